"""Schedules: when each part of the parameters is sent, and its mean applied."""
