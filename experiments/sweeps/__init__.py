"""Sweeps: many runs from one config, which are trained and compared."""
