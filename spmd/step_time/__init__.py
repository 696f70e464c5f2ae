"""Prediction of the time of a step.

From hardware, network, closed forms, and the schedule of a compiled program.
"""
