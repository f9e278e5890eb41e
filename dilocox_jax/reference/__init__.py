"""Every method in plain numpy: the page to read first, and the tests' oracle.

`methods` trains replicas step by step, `fragments` says which leaves are sent
together, `exchanges` averages what is sent, and `optimizers` has SGD, AdamW and
Muon. Nothing here is fast, and nothing here uses JAX or another part of the
package. What only the tests compare with is in tests/oracles: codecs, slices,
replicas that are away or slow.
"""
