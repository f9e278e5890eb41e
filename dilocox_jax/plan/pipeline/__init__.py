"""In which order pipeline stages compute micro-batches."""
