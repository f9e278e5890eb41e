"""Rounds of a method, for all replicas: programs, and what dispatches them."""
