"""Chains of payloads, the messages that they need, and their bytes."""

import dataclasses

from dilocox_jax.checks import one_of
from dilocox_jax.plan.wire.leaf import Leaf, Shapes, leaf_of
from dilocox_jax.plan.wire.payload import ROLES, Dense, Payload, Wire
from dilocox_jax.plan.wire.reduction import LowRank


@dataclasses.dataclass(frozen=True)
class Chain(Payload):
  """Payloads one after the other; each is applied to what the last carries.

  Links must stand in the order projections, selections, quantiser. Projections
  come first, since only they may be undone after the mean: whatever follows
  them is decoded before it. A quantiser comes last, as codes can be decoded but
  not reduced further. So low_rank+int, top_k+int and
  random_mask+top_k+int are chains; int+top_k and top_k+low_rank are refused.

  Wire: the sum over its links.

  Attributes:
    links: The payloads; dense fp32 is added if no quantiser ends the chain.
  """

  links: tuple[Payload, ...]

  def __post_init__(self):
    links = ()
    for part in self.links:  # A chain inside a chain gives its links.
      links += part.links if isinstance(part, Chain) else (part,)
    if not links:
      raise ValueError("a chain must have at least one link")
    if _order(links[-1]) != _LAST:
      links += (Dense(),)
    object.__setattr__(self, "links", links)
    kinds = [_order(link) for link in links]
    if kinds != sorted(kinds) or kinds.count(_LAST) != 1:
      names = " -> ".join(type(link).__name__ for link in links)
      raise ValueError(
        f"the chain {names} cannot be built: shared low rank and random masks "
        "come first, one quantiser comes last"
      )

    if sum(isinstance(link, LowRank) for link in links) > 1:
      raise ValueError(
        "a chain has one low rank at most: the factors of a second one would "
        "have no place to be kept"
      )


_LAST = len(ROLES) - 1


def _order(link: Payload) -> int:
  """Returns 0 for projections, 1 for selections, 2 for quantisers."""
  one_of(f"role of {type(link).__name__}", link.role, ROLES)
  return list(ROLES).index(link.role)


def links_of(payload: Payload) -> tuple[Payload, ...]:
  """Returns the links of the complete chain that a payload stands for."""
  if isinstance(payload, Chain):
    return payload.links
  return Chain((payload,)).links


@dataclasses.dataclass(frozen=True)
class Encoding:
  """The links of a chain after its projections, decoded before the mean.

  Attributes:
    links: Selections, then the quantiser.
  """

  links: tuple[Payload, ...]

  def wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Returns the arrays sent for one leaf."""
    head, *rest = self.links
    arrays = head.own_wires(leaf)
    for carried in head.carried(leaf):
      arrays += Encoding(tuple(rest)).wires(carried)
    return arrays

  def num_bytes(self, leaf: Leaf) -> int:
    """Returns the size of the arrays sent for one leaf (bytes)."""
    return sum(wire.num_bytes for wire in self.wires(leaf))

  @property
  def keeps_places(self) -> bool:
    """Whether every value is sent, in the order of the leaf."""
    return len(self.links) == 1

  @property
  def is_summable(self) -> bool:
    """Whether a network may add it up without a loss of precision."""
    return self.links == (Dense(),)


def leaf_messages(
  payload: Payload, leaf: Leaf
) -> tuple[tuple[Encoding, Leaf], ...]:
  """Lists the messages of one leaf in turn: an encoding and what it encodes.

  low_rank+int has two messages, the left factor and the right one, both as int
  codes. All other chains have one.

  Args:
    payload: The payload of the exchange.
    leaf: The leaf.
  """
  head, *rest = links_of(payload)
  if not head.is_projection:
    return ((Encoding((head, *rest)), leaf),)
  messages = ()
  for carried in head.carried(leaf):
    messages += leaf_messages(Chain(tuple(rest)), carried)
  return messages


def wires(payload: Payload, path: str, shape: tuple[int, ...]) -> list[Wire]:
  """Lists all arrays in which one replica encodes a leaf for one exchange."""
  messages = leaf_messages(payload, leaf_of(path, shape))
  return [wire for encoding, leaf in messages for wire in encoding.wires(leaf)]


def num_bytes(payload: Payload, shapes: Shapes) -> int:
  """Returns the size of one replica's encoded tree (bytes).

  Args:
    payload: Payload of the exchange.
    shapes: Leaf shapes by path.
  """
  return sum(
    wire.num_bytes
    for path, shape in shapes.items()
    for wire in wires(payload, path, shape)
  )
