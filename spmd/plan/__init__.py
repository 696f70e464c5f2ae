"""The plan of a run, with every decision resolved, and its context for traced model code."""
