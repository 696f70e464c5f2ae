"""Text generation with a KV cache."""
