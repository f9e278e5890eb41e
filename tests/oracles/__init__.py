"""Slow float64 twins of the methods, written from their definitions alone."""
