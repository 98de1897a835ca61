"""What a model sees, and what is remembered of it."""
