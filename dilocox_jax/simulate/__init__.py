"""Computes how long a run would take on given links, and what it would send."""
