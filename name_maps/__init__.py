"""Maps between model families and Hugging Face checkpoints: config.json fields and tensor names."""
