"""Parts that several programs share: flags, errors, processes and links."""
