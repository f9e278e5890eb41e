"""Measures what several replicas cost in loss, by many small runs."""
