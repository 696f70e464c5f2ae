"""Reports of plans and runs: one HTML file with charts, which needs nothing else to open."""
