"""Devices and processes, and which of them holds which part of a replica."""
