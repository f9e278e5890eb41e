"""Aggregators, which average over replicas by messages on slow links."""
