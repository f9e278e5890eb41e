"""Devices and processes: the parts of replicas they hold, their connections."""
