"""What binaries need around the simulator: options, runs and pages."""
