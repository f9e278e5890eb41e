"""From pseudo-gradients to new outer parameters."""
