"""Every method in plain numpy: for readers first, and as the tests' oracle.

`methods` trains replicas step by step. `fragments` says which leaves are sent
together. `exchanges` and `pairs` average over replicas. `optimizers` has SGD,
AdamW and Muon. The other modules are for replicas that exchange through files
in a store (docs/concepts.md, "Mailbox").

Nothing here is fast, and nothing here uses JAX or another part of the package.
"""
