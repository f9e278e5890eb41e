"""Averages over the slow links."""
