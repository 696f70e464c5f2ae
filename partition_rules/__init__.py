"""Partition rules of parameters and activations, one short table per model family."""
