"""Runs the rounds of a method: compiled programs, and ways to dispatch them."""
