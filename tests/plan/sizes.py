"""Bytes of payloads, and the low-rank payloads, that tests share."""

from dilocox_jax.plan.wire.chain import wires
from dilocox_jax.plan.wire.reduction import LowRank

SHARED = LowRank(2)
LOCAL = LowRank(2, factorisation="local")


def wire_bytes(payload, path, shape):
  """By name, added up."""
  found = {}
  for wire in wires(payload, path, shape):
    found[wire.name] = found.get(wire.name, 0) + wire.num_bytes
  return found
