"""The inner step (one optimizer step) of a replica on one or several devices."""
