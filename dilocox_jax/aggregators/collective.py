"""What a collective is: one way to average the messages of an exchange.

The network may add up fp32 values. Codes cannot be added. Either all replicas
gather all codes, or each replica decodes and adds up one slice and encodes the
mean of the slice once more. The second rounds twice, but its bytes hardly grow
with the number of replicas (`plan.operations`). Selected values have different
places on different replicas and are always gathered.

A replica sends M - 1 messages when it gathers. When it scatters it sends
(M - 1) / M of a message and as much of the means, which may have finer codes:
with 1 bit for values and 2 for means, 2 and 2 for M = 3, 3 and 2.25 for M = 4.

Each collective is a class in a file of its own, and says there what it does
and what it sends. Others are added by `dilocox_jax.register_collective`.
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

# Bytes with which a sender says in a message whether it participates.
FLAG_BYTES = 1


class Sender(NamedTuple):
  """What a collective is told of the replica whose values it averages.

  Attributes:
    participates: Whether the replica counts in the mean; if not, its values are
      zeros.
    key: Random key of the exchange, equal on all replicas.
    axis_name: Axis over which replicas are mapped.
    shares_add_up: Whether the own parts of all replicas add up to the mean
      times their number even where the mean is rounded too
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
    averages_parameters: Whether outer parameters are to be averaged too, so
      that those of replicas which get different means stay together. Only an
      exchange in float32 does so (`aggregators.exchange`).
  """

  is_shared: ClassVar[bool] = True
  averages_parameters: ClassVar[bool] = False

  def refusal(self, codec: Codec) -> str:
    """Returns why messages of a codec cannot be averaged so; "" if they can.

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
      encoder: What encodes the leaves of the message.
      shapes: Shapes of the leaves, with the layer axis.
      num_replicas: Number of replicas, M.
    """
    raise NotImplementedError

  def reduce(
    self, encoder: Any, leaves: Sequence[Array], sender: Sender
  ) -> Coroutine:
    """Averages the leaves of one message over the replicas that participate.

    All leaves travel together. The message also says whether its sender
    participates: a message for that alone would cost a slow link as much
    latency again.

    Args:
      encoder: Encodes the leaves.
      leaves: Values of this replica, [num_layers, *shape] each.
      sender: What else there is to know of this replica.

    Returns:
      A coroutine that stops where a message leaves and where it has arrived
      (`Aggregator.average_coroutine`). It returns a `codecs.base.Reduced`.
    """
    raise NotImplementedError


def register_collective(name: str, collective: type[Collective]) -> None:
  """Lets `exchange.collective` name a collective of one's own.

  Args:
    name: Its name, e.g. "pairs".
    collective: A class derived from `Collective`, built without arguments.

  Raises:
    ValueError: If the name is taken, or that is no such class.
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
  """Returns the collective that carries the messages of a codec.

  "auto" stands for the one that sends least of large leaves. Where these ways
  send equally much, as between two replicas, gathering is taken: it rounds once
  and waits for one message instead of two.

  Args:
    codec: The codec.
    collective: One of `plan.collectives.collective_names()`, or a collective.
    num_replicas: Number of replicas, M; read for "auto" alone.

  Raises:
    ValueError: If the collective cannot carry them.
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
  build: Any = loaded(COLLECTIVES[name])
  return build()


def _smallest(encoder: Encoder, num_replicas: int) -> str:
  """Returns the name of the collective that sends the fewest bytes."""
  if encoder == Float():
    return "all_reduce"
  if not isinstance(encoder, Quantizer):
    return "all_gather"
  large_leaf = ((1, 4096),)
  values = encoded_bytes(encoder, large_leaf)
  means = encoded_bytes(encoder.of_means, large_leaf)
  gathered = num_replicas * values
  return "reduce_scatter" if values + means < gathered else "all_gather"
