"""One module per benchmark of experiments.tools.bench."""
