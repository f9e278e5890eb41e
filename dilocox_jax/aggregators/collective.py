"""Base class and choice of collectives, which average messages over replicas.

An all-reduce adds up values in fp32, but it cannot add up the codes of a codec.
Two collectives average codes over all M replicas of a program:

- `all_gather`: every replica receives the codes of all replicas and decodes
  them. Each replica sends its message M - 1 times.
- `reduce_scatter`: each replica decodes and averages one slice of the values,
  encodes the mean of the slice, and sends it to all others. Each replica sends
  (M - 1) / M of a message and (M - 1) / M of the encoded means. So values are
  rounded twice, but the bytes hardly grow with M.

Example: values have 1 bit and means have 2 bits. With M = 3 replicas, each
sends 2 bits for each value by `all_gather`, and 2/3 (1 + 2) = 2 bits by
`reduce_scatter`. With M = 4 it sends 3 bits by `all_gather`, and 3/4 (1 + 2) =
2.25 bits by `reduce_scatter`.

Of these two, only `all_gather` can average messages for which each replica
chooses the values that it sends, such as its largest ones.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from dilocox_jax.aggregators.sizes import encoded_bytes
from dilocox_jax.checks import one_of, require
from dilocox_jax.codecs.base import Codec, Encoder, Quantizer
from dilocox_jax.codecs.batching import Shape
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.plan.choices import loaded
from dilocox_jax.plan.collectives import AUTO, COLLECTIVES, collective_names
from dilocox_jax.plan.operations import Operation
from dilocox_jax.trees import Array, Boolean

# Bytes of the flag in a message that says whether its sender participates.
FLAG_BYTES = 1


class Sender(NamedTuple):
  """What a collective is told about its replica and about the exchange.

  Attributes:
    participates: Whether the replica counts in the mean (boolean scalar). If
      not, its values are zeros.
    key: Random key of the exchange, equal on all replicas.
    axis_name: Name of the axis over which replicas are mapped.
    shares_add_up: Whether a collective that rounds the mean must correct
      `Reduced.own` (this replica's decoded values) for the loss of this
      rounding. The corrected values of all replicas add up to the rounded mean
      times the number of participants, so error feedback also makes up for this
      loss.
  """

  participates: Boolean
  key: Array
  axis_name: str
  shares_add_up: bool = False


class Collective:
  """One way to average the messages of replicas. A subclass defines the way.

  Attributes:
    is_shared: Whether all replicas get the same mean.
    averages_parameters: Whether an exchange in float32 must also average the
      outer parameters, to keep them close if replicas get different means.
  """

  is_shared: ClassVar[bool] = True
  averages_parameters: ClassVar[bool] = False

  def refusal(self, codec: Codec) -> str:
    """Returns why this collective cannot average the messages of a codec.

    The result is the end of an error message that begins with
    "collective='NAME' ". It is "" (the default) if the collective can average
    them.
    """
    del codec
    return ""

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns the operations that average one message, e.g. an all-gather.

    Each operation knows how many bytes it carries.

    Args:
      encoder: Encoder of the leaves in the message.
      shapes: Shape of each leaf, (num_layers, *shape).
      num_replicas: Number of replicas, M.
    """
    raise NotImplementedError

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Averages the leaves of one message over the replicas that participate.

    A subclass should send all leaves together, with the flag that says whether
    the sender counts in the mean: a second message would double the latency.

    Args:
      encoder: Encoder of the leaves.
      leaves: Values of this replica, [num_layers, *shape] each.
      sender: Whether this replica participates, its random key and its axis.

    Returns:
      A coroutine that yields before a message leaves and after it has arrived
      (`Aggregator` has an example), and returns `codecs.base.Reduced`.
    """
    raise NotImplementedError


def register_collective(name: str, collective: type[Collective]) -> None:
  """Registers a collective under a name, for `exchange.collective` in a config.

  Args:
    name: Name of the collective, e.g. "pairs".
    collective: A class derived from `Collective`, built without arguments.

  Raises:
    ValueError: If the name is taken or is no identifier, or if `collective` is
      not such a class.
  """
  is_collective = isinstance(collective, type) and issubclass(
    collective, Collective
  )
  require(
    is_collective,
    f"collective {name!r} must be a class derived from dilocox_jax.Collective",
  )
  COLLECTIVES.add(name, collective)


def chosen_collective(
  codec: Codec, collective: str | Collective, num_replicas: int
) -> Collective:
  """Returns the collective that averages the messages of a codec.

  "auto" chooses

  - "all_reduce" if the messages are in float32;
  - "reduce_scatter" if a `Quantizer` encodes them, and "all_gather" would send
    more bytes for large leaves;
  - "all_gather" otherwise.

  Args:
    codec: The codec.
    collective: "auto", another name in `plan.collectives.collective_names()`,
      or a collective.
    num_replicas: Number of replicas, M; only read for "auto".

  Raises:
    ValueError: If there is no collective of this name, or the collective cannot
      average messages of this codec.
  """
  name = type(collective).__name__
  if isinstance(collective, str):
    one_of("collective", collective, collective_names())
    name = collective
    if name == AUTO:
      name = _smallest(codec.encoder, num_replicas)
    collective = _built(name)
  require(
    isinstance(collective, Collective),
    f"collective={collective!r} must be a name or a dilocox_jax.Collective",
  )
  reason = collective.refusal(codec)
  require(not reason, f"collective={name!r} {reason}")
  return collective


def _built(name: str) -> Collective:
  """Imports the class of a registered collective, and builds one."""
  build: Any = loaded(COLLECTIVES[name])
  return build()


def _smallest(encoder: Encoder, num_replicas: int) -> str:
  """Returns the name of the collective that "auto" chooses."""
  if encoder == Float():
    return "all_reduce"
  if not isinstance(encoder, Quantizer):
    return "all_gather"
  # From about 1,000 values on, bytes are in proportion to the number of values.
  large_leaf = ((1, 4096),)
  values = encoded_bytes(encoder, large_leaf)
  means = encoded_bytes(encoder.of_means, large_leaf)
  gathered = num_replicas * values
  # Both sides are M / (M - 1) times the bytes that a replica sends.
  return "reduce_scatter" if values + means < gathered else "all_gather"
