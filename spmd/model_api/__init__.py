"""What a model declares about itself: its functions, precision, rematerialization and attention."""
