"""Which collective carries an encoding, and what each replica then sends.

Sums of fp32 may be left to the network. Codes cannot be added, so they are
either gathered by all, or added up by the replica that owns a chunk, which
encodes the mean once more: twice the rounding, but bytes that hardly grow
with the number of replicas. Selected values have no common places and are
always gathered.
"""

import collections
import dataclasses

from dilocox_jax.checks import one_of
from dilocox_jax.plan.wire.chain import Encoding, leaf_messages, links_of
from dilocox_jax.plan.wire.leaf import Leaf, Shapes, leaf_of
from dilocox_jax.plan.wire.payload import Dense, Int, Payload, row_width

# Replicas that a sum of 16-bit values can count: 257 is no bfloat16.
MOST_IN_16_BITS = 256
COLLECTIVES = ("auto", "all_reduce", "all_gather", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operation over the replica axis.

  Attributes:
    kind: "all_reduce", "all_gather", "all_to_all" or "broadcast".
    operand_bytes: What one replica hands to it (bytes).
  """

  kind: str
  operand_bytes: int

  def sent_bytes(self, num_replicas: int) -> int:
    """Bytes a replica sends, and receives, on a ring.

    Source: Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce": 2 (M -
    1) / M of the operand, rounded up; M - 1 times the operand to gather it;
    (M - 1) / M of it to exchange chunks. A broadcast is passed along a chain.

    Args:
      num_replicas: M; one replica alone sends nothing.
    """
    others = num_replicas - 1
    if self.kind == "broadcast":
      return self.operand_bytes if others else 0
    if self.kind == "all_gather":
      return others * self.operand_bytes
    twice = 2 if self.kind == "all_reduce" else 1
    return -(-twice * others * self.operand_bytes // num_replicas)


def chosen_collective(
  encoding: Encoding, collective: str, num_replicas: int
) -> str:
  """The collective for an encoding.

  Left to itself, the one that sends least; where two replicas make gathering
  and scattering equal, gathering, which rounds once.

  Args:
    encoding: What is sent.
    collective: One of `COLLECTIVES`.
    num_replicas: M.

  Raises:
    ValueError: If the encoding cannot travel that way.
  """
  if collective == "auto":
    if encoding.is_summable:
      return "all_reduce"
    scatters = encoding.keeps_places and num_replicas > 2
    return "reduce_scatter" if scatters else "all_gather"
  is_dense = isinstance(encoding.links[0], Dense)
  if collective == "all_reduce" and not is_dense:
    raise ValueError(
      f"collective={collective!r} would add up codes: take 'all_gather' or "
      "'reduce_scatter', or a dense codec"
    )
  if collective == "all_reduce" and num_replicas > MOST_IN_16_BITS:
    if not encoding.is_summable:
      raise ValueError(
        f"collective={collective!r} counts at most {MOST_IN_16_BITS} replicas "
        "in 16 bits: take 'all_gather' or 'reduce_scatter', or float32"
      )
  if collective == "reduce_scatter" and not encoding.keeps_places:
    raise ValueError(
      f"collective={collective!r} needs every value in its place, but the "
      "codec selects values: take 'all_gather'"
    )
  one_of("collective", collective, COLLECTIVES)
  return collective


def check_collective(payload: Payload, collective: str) -> None:
  """Raises ValueError if a payload cannot travel that way."""
  parts = [part for part in links_of(payload) if not part.is_projection]
  chosen_collective(Encoding(tuple(parts)), collective, 2)


def owner_slices(encoding: Encoding, leaf: Leaf, num_replicas: int) -> Leaf:
  """A leaf cut into one chunk a replica, zeros at the end.

  Where rows share a scale they are not cut.

  Args:
    encoding: What is sent.
    leaf: The leaf; its layers are cut as one.
    num_replicas: M; the first axis of the result.
  """
  last = encoding.links[0]
  total = leaf.num_layers * leaf.size
  if isinstance(last, Int) and last.scale == "row":
    width = row_width(leaf)
    return Leaf(num_replicas, (-(-total // width // num_replicas), width))
  return Leaf(num_replicas, (-(-total // num_replicas),))


def collectives(
  payload: Payload,
  shapes: Shapes,
  num_replicas: int,
  collective: str = "auto",
) -> list[Collective]:
  """The operations of one exchange of some leaves, one after the other.

  All leaves of a phase that go one way are one message, and each says whether
  its sender takes part.

  Args:
    payload: What is sent.
    shapes: Leaf shapes by path.
    num_replicas: M.
    collective: One of `COLLECTIVES`.

  Raises:
    ValueError: If the payload cannot travel that way.
  """
  messages: dict[tuple[int, str], collections.Counter[str]] = {}
  for path, shape in shapes.items():
    asked = leaf_messages(payload.at(path), leaf_of(path, shape))
    for phase, (encoding, leaf) in enumerate(asked):
      way = chosen_collective(encoding, collective, num_replicas)
      flags = _flags(encoding, way, num_replicas)
      operands = messages.setdefault((phase, way), flags)
      if way == "reduce_scatter":
        pieces = owner_slices(encoding, leaf, num_replicas)
        operands["all_to_all"] += encoding.num_bytes(pieces)
        operands["all_gather"] += encoding.num_bytes(Leaf(1, pieces.shape))
      else:
        operands[way] += encoding.num_bytes(leaf)
  return [
    Collective(*item)
    for _, operands in sorted(messages.items(), key=lambda each: each[0][0])
    for item in operands.items()
  ]


def _flags(
  encoding: Encoding, way: str, num_replicas: int
) -> collections.Counter[str]:
  """Bytes by which a message says whether its sender takes part.

  In a sum one more number; a byte where each sender is read by itself. The
  owner of a chunk has divided already and says nothing any more.
  """
  if way == "reduce_scatter":
    return collections.Counter(all_to_all=num_replicas)
  if way == "all_gather":
    return collections.Counter(all_gather=1)
  return collections.Counter(all_reduce=encoding.num_bytes(Leaf(1, (1,))))
