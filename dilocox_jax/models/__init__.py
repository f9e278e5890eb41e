"""The decoder that every run trains, and its loss."""
