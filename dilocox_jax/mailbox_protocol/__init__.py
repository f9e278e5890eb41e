"""Replicas that share no runtime meet in an object store.

docs/mailbox.md says how it is used, what it guarantees, and who can do what.
Nothing here needs JAX: a message is a list of numpy arrays.
"""
