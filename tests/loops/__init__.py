"""Training scripts in the styles of public repositories, each once plain and once with this package."""
