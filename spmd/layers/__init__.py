"""Layers with collectives: attention over a split sequence, mixture of experts, vocabulary-parallel head."""
