"""Every method in plain numpy: the page to read first, and the tests' oracle.

`methods` trains replicas step by step, `fragments` says which leaves are sent
together, `exchanges` averages what is sent, `codecs` rounds it, `optimizers`
has SGD, AdamW and Muon, `membership` replicas that are away or slow, and
`published` the papers' settings. Nothing here is fast, and nothing here uses
JAX or another part of the package.
"""
