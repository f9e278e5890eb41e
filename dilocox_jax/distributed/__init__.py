"""Devices and processes: what parts of replicas they hold, how they connect."""
