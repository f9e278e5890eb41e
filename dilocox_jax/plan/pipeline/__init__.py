"""The order in which pipeline stages compute micro-batches."""
