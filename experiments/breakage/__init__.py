"""Faults that `experiments.faults` makes on purpose."""
