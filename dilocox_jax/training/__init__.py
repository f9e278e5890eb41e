"""One run: building its parts, training, evaluating, saving and resuming."""
