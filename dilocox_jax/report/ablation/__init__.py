"""Report of an ablation: tables and figures over its trials."""
