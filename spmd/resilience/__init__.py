"""Agreement of processes, preemption, watchdog, divergence, and silent data corruption."""
