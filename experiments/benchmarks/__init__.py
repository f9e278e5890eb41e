"""One module per benchmark of experiments.bench."""
