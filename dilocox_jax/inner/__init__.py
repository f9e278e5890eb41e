"""The optimizer step of one replica. It does not depend on other replicas."""
