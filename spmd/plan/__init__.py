"""Every decision of a run, resolved, and how it reaches the model code that is traced under it."""
