"""Prediction of the time of a step, from closed forms or the schedule of a compiled program."""
