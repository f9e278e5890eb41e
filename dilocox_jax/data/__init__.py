"""Where tokens come from and in which order the replicas read them."""
