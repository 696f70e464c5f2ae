"""Reports of plans and runs: one HTML file with charts, for offline use."""
