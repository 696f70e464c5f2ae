"""Memory, collectives and time of a step, read from its trace and its compiled program."""
