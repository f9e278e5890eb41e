"""The methods in plain numpy, against which the fast code is tested.

`methods` and `pairs` train replicas step by step. `fragments` divides the
parameters, `exchanges` averages over replicas, and `optimizers` has SGD, AdamW
and Muon. The other modules are for replicas that exchange through files in a
store (docs/concepts.md, "Mailbox"). Of these, the fast code itself uses
`fingerprint`, `row_codecs` and `shares`.

These modules use neither JAX nor other parts of the package.
"""
