"""Hugging Face checkpoints in and out: safetensors files, families of models, loading and saving."""
