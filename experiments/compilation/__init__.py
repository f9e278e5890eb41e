"""Asks a compiler about the programs of a run, without the machines."""
