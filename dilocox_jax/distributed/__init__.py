"""Devices, processes, and which of them holds what of a replica."""
