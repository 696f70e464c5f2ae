"""Training state, the compiled step, and the loop around it."""
