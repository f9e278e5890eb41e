"""Schedules: when each fragment is sent and applied."""
