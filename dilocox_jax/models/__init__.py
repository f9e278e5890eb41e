"""The decoder, its loss and checkpoints, and models that users pass."""
