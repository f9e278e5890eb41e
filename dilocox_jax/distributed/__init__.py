"""Assigns the parts of replicas to devices, and connects processes."""
