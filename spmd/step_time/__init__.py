"""Prediction of how long a step takes: hardware, network, closed forms, and the schedule of a compiled program."""
