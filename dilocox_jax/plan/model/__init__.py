"""Sizes of models, and how their arrays are divided among devices."""
