"""Loads texts and other data, and divides them into batches for replicas."""
