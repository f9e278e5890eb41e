"""What a run does and sends, described without arrays (numpy only)."""
