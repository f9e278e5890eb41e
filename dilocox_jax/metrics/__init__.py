"""Files that a run writes; each module writes one kind."""
