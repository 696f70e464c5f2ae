"""What keeps a long run alive, and what notices that it has gone wrong."""
