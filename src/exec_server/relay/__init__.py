"""A channel through a stranger: both ends of the encrypted relay."""
