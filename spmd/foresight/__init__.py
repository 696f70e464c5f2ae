"""What a training run will do, read from its compiled program before it runs."""
