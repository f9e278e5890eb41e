"""Computes the inner step (one optimizer step) of a replica on its devices."""
