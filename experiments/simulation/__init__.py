"""The simulator as a binary uses it: options, runs and pages."""
