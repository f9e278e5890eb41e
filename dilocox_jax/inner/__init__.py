"""One optimizer step of a replica, which does not know other replicas."""
