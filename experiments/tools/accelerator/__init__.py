"""What experiments.tools.accelerator_check measures."""
