"""Compliance: the real reference binary on the other end.

`python -m compliance` (or `make compliance`) fetches the pinned reference and runs this folder's tests
with it. `codex exec`, the reference's own client, drives a server here; nothing of it is simulated but
the model that tells it what to do.
"""
