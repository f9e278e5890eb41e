"""Parts that all programs share: flags, errors, processes and links."""
