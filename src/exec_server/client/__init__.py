"""A machine across a connection: the same interface as services.py, one call per message."""
