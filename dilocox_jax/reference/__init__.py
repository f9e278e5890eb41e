"""Every method in plain numpy: the page to read first, and the tests' oracle.

`methods` trains replicas step by step, `exchanges` averages what they send,
`codecs` rounds it, and `optimizers` has SGD and AdamW. Nothing here is fast,
and nothing here uses JAX.
"""
