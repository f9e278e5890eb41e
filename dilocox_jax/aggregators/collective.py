"""The base class of collectives, which average the messages of an exchange.

Values in fp32 can be added up by the network (`all_reduce`). The codes of a
codec cannot be added. There are two ways to average codes:

- `all_gather`: every replica receives the codes of all replicas and decodes
  them. Each replica sends its message M - 1 times.
- `reduce_scatter`: each replica decodes and adds up one slice, and encodes the
  mean of the slice once more. Each replica sends (M - 1) / M of a message and
  (M - 1) / M of the encoded means. So values are rounded twice, but the bytes
  hardly grow with the number of replicas.

Example: values have 1 bit and means have 2 bits. With M = 3 replicas, each
sends 2 bits a value by `all_gather`, and 2/3 (1 + 2) = 2 by `reduce_scatter`.
With M = 4 it sends 3 and 3/4 (1 + 2) = 2.25 bits.

A codec that selects values takes other places on each replica, so its messages
are always gathered.

Each collective is a class in a file of its own. Users add others by
`dilocox_jax.register_collective`.
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
  """The replica whose values a collective averages.

  Attributes:
    participates: Whether the replica counts in the mean (boolean scalar). If it
      does not, its values are zeros.
    key: Random key of the exchange, equal on all replicas.
    axis_name: Axis over which replicas are mapped.
    shares_add_up: Whether `Reduced.own` of all replicas must add up to the mean
      times the number of participants, also if the mean was rounded
      (`aggregators.reduce_scatter`).
  """

  participates: Boolean
  key: Array
  axis_name: str
  shares_add_up: bool = False


class Collective:
  """One way to average the messages of replicas.

  Attributes:
    is_shared: Whether all replicas get the same mean.
    averages_parameters: Whether the exchange shall also average the outer
      parameters. So the outer parameters of replicas that get different means
      stay close. Only an exchange in float32 does this
      (`CompressedMean._sends_parameters`).
  """

  is_shared: ClassVar[bool] = True
  averages_parameters: ClassVar[bool] = False

  def refusal(self, codec: Codec) -> str:
    """Returns why the collective cannot average a codec's messages, or "".

    The text follows "collective='name' " in an error message.

    Args:
      codec: The codec of the exchange.
    """
    del codec
    return ""

  def operations(
    self, encoder: Encoder, shapes: tuple[Shape, ...], num_replicas: int
  ) -> list[Operation]:
    """Returns the operations of one message, which the simulator prices.

    Args:
      encoder: Encodes the leaves of the message.
      shapes: Shapes of the leaves, with the layer axis.
      num_replicas: Number of replicas, M.
    """
    raise NotImplementedError

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Averages the leaves of one message over the replicas that participate.

    All leaves travel together. The message also says whether its sender
    participates, because a second message would double the latency on a slow
    link.

    Args:
      encoder: Encodes the leaves.
      leaves: Values of this replica, [num_layers, *shape] each.
      sender: The replica: whether it participates, its key and its axis.

    Returns:
      A coroutine that stops before a message leaves and after it has arrived
      (`Aggregator`). In the end it returns `codecs.base.Reduced`.
    """
    raise NotImplementedError


def register_collective(name: str, collective: type[Collective]) -> None:
  """Gives a user's collective a name for `exchange.collective`.

  Args:
    name: Name of the collective, e.g. "pairs".
    collective: A class derived from `Collective`, built without arguments.

  Raises:
    ValueError: If the name is taken, or `collective` is no such class.
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

  "auto" stands for the collective that sends the fewest bytes for large leaves.
  If "all_gather" and "reduce_scatter" send equally many, as between two
  replicas, "all_gather" is taken: it rounds once and waits for one message
  instead of two.

  Args:
    codec: The codec.
    collective: One of `plan.collectives.collective_names()`, or a collective.
    num_replicas: Number of replicas, M; read only for "auto".

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
  reason = collective.refusal(codec)
  require(not reason, f"collective={name!r} {reason}")
  return collective


def _built(name: str) -> Collective:
  """Returns a new collective of a name that is known."""
  build: Any = loaded(COLLECTIVES[name])
  return build()


def _smallest(encoder: Encoder, num_replicas: int) -> str:
  """Returns the name of the collective that "auto" stands for.

  Args:
    encoder: Encodes the leaves of each message.
    num_replicas: Number of replicas, M.
  """
  if encoder == Float():
    return "all_reduce"
  if not isinstance(encoder, Quantizer):
    return "all_gather"
  large_leaf = ((1, 4096),)
  values = encoded_bytes(encoder, large_leaf)
  means = encoded_bytes(encoder.of_means, large_leaf)
  gathered = num_replicas * values
  return "reduce_scatter" if values + means < gathered else "all_gather"
