"""Programs and parts that measure speeds, links and compiled programs."""
