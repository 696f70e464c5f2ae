"""Health of a machine before a run: its drivers and network, its speeds, its slow processes."""
