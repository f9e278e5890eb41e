"""The plan of a run: what it computes and sends, without JAX (numpy only)."""
