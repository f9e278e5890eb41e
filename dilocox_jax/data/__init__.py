"""Texts, their split into training and validation, and replicas' batches."""
