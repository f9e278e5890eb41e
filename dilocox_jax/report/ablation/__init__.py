"""The report of an ablation: one table and its figures."""
