"""Prediction of the time of a step.

From the speeds of chips, the network, closed forms, and the schedule of a compiled program.
"""
