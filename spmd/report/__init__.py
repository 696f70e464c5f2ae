"""Reports of plans and runs: one HTML file with charts, which opens offline."""
