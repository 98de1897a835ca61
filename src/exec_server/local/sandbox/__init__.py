"""Fewer rights than this process has: a profile becomes a plan, and a backend carries it out."""
