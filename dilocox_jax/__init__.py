"""Training across slow links: DiLoCoX and its relatives in JAX."""
