"""The plan of a run: what the run computes and sends, and when.

The modules of this package do not need JAX.
"""
