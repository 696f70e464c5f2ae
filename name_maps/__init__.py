"""One short file per model family: its config.json, and which tensor of a Hugging Face checkpoint each parameter is."""
