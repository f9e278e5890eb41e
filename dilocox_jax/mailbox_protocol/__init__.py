"""The mailbox: replicas without a common runtime exchange through a store.

The store is a folder or a bucket. The pages in docs/mailbox/ say how a mailbox
is used, what it guarantees, and what damage a stranger could do who can write
into the store. This package does not import JAX: a message is a list of numpy
arrays.
"""
