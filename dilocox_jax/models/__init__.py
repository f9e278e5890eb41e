"""The built-in decoder, its loss and checkpoints, and models that users pass."""
