"""Simulates a run on given links: its seconds and bytes, and where they go."""
