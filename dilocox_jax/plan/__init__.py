"""The plan of a run: what the run computes and sends, and when.

The modules of this package need numpy, but not JAX.
"""
