"""What an operation costs in bytes is what its messages add up to."""

import math

import pytest

from dilocox_jax.plan.operations import (
  OPERATIONS,
  StoreObject,
  StoreShares,
  operation,
)


@pytest.mark.parametrize(
  "kind", sorted(OPERATIONS.keys() - {StoreObject.kind, StoreShares.kind})
)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_the_bytes_of_an_operation_are_those_of_its_messages(
  kind, num_replicas
):
  one = operation(kind, 1000)
  sent_bytes = [0.0] * num_replicas
  for send in one.sends(num_replicas):
    senders = range(num_replicas) if send.sender is None else [send.sender]
    for sender in senders:
      sent_bytes[sender] += send.size_bytes
  assert math.ceil(max(sent_bytes) - 1e-6) == one.sent_bytes(num_replicas)


def test_an_unknown_kind_is_named():
  with pytest.raises(ValueError, match="kind='ring' must be one of all_reduce"):
    operation("ring", 8)
