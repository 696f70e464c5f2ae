"""Checkpoints that are verified before they are used."""
