"""Layers with collectives: attention over a split sequence, experts, vocabulary-parallel head."""
