"""Text generation with a cache of keys and values."""
