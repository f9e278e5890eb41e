"""The decoder, its loss, its checkpoints, and models that users pass."""
