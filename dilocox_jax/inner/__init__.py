"""The local step that does not know it is averaged."""
