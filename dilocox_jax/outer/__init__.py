"""The outer step: from pseudo-gradients to new outer parameters."""
