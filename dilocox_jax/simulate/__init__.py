"""What a run would cost on given links: seconds, bytes, and where they go."""
