"""One short table per model family: how its parameters and activations are split."""
