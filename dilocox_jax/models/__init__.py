"""The decoder and its loss."""
