"""Corpora, tokenizers, and batches as a function of the step."""
