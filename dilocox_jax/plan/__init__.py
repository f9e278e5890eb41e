"""The plan of a run: what the run computes and sends, and when.

Nothing here needs JAX (only numpy).
"""
