"""Declarations of a model: functions, rematerialization, attention, gradient transforms."""
