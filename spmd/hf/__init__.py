"""Hugging Face checkpoints: families of models, loading and saving."""
