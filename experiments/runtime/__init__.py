"""What all binaries share: flags, errors, processes, locks and logs."""
