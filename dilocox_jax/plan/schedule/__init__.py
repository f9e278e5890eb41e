"""When which fragment is sent and applied."""
