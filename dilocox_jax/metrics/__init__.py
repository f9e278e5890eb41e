"""The files and logs to which a run writes its metrics."""
