"""Measuring instruments: speeds, links and compiled programs."""
