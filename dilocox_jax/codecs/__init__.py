"""From values to what is on the wire, and back."""
