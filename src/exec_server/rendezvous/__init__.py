"""The stranger in the middle: a registry that introduces, and a router that carries what it cannot read."""
