"""Lists many runs from one config, trains them, and reports their results."""
