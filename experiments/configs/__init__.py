"""Configs: `default` holds every field, the others are diffs of it."""
