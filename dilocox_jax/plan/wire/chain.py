"""From payloads to the wire: chains, the exchanges they ask for, and bytes."""

import dataclasses

from dilocox_jax.plan.wire.leaf import Leaf, Shapes, leaf_of
from dilocox_jax.plan.wire.payload import E3M0, Dense, Int, Payload, Wire


def _ends(payload: Payload) -> bool:
  return isinstance(payload, Dense | Int | E3M0)


@dataclasses.dataclass(frozen=True)
class Chain(Payload):
  """Payloads one after the other, each on what the one before carries.

  Wire: the sum over its parts.

  Attributes:
    links: Projections, then selections, then one that ends the chain (dense
      fp32 if none is given).
  """

  links: tuple[Payload, ...]

  def __post_init__(self):
    flat = [p for part in self.links for p in _links(part)]
    object.__setattr__(self, "links", tuple(flat))
    if not self.links:
      raise ValueError("a chain must have at least one part")
    if not _ends(self.links[-1]):
      object.__setattr__(self, "links", (*self.links, Dense()))
    kinds = [_order(part) for part in self.links]
    if kinds != sorted(kinds) or kinds.count(2) != 1:
      names = " -> ".join(type(part).__name__ for part in self.links)
      raise ValueError(
        f"the chain {names} cannot be built: shared low rank and random masks "
        "come first, one quantiser comes last"
      )

  def at(self, path: str) -> "Chain":
    """The chain of one leaf."""
    return Chain(tuple(part.at(path) for part in self.links))


def _links(part: Payload) -> tuple[Payload, ...]:
  """A chain inside a chain is its own parts."""
  return part.links if isinstance(part, Chain) else (part,)


def _order(part: Payload) -> int:
  return 0 if part.is_projection else 2 if _ends(part) else 1


@dataclasses.dataclass(frozen=True)
class ByLeaf(Payload):
  """Leaves with payloads of their own.

  Attributes:
    default: For every leaf that is not named.
    special: Pairs of path and payload.
  """

  default: Payload
  special: tuple[tuple[str, Payload], ...] = ()

  def at(self, path: str) -> Payload:
    """The payload of one leaf."""
    return dict(self.special).get(path, self.default)


def links_of(payload: Payload) -> tuple[Payload, ...]:
  """The parts of a payload as of a chain that is complete."""
  if isinstance(payload, ByLeaf):  # All leaves have parts of one kind.
    return links_of(payload.default)
  if isinstance(payload, Chain):
    return payload.links
  return Chain((payload,)).links


@dataclasses.dataclass(frozen=True)
class Encoding:
  """What remains of a chain after its projections: decoded before the mean.

  Attributes:
    links: Selections, then the quantiser.
  """

  links: tuple[Payload, ...]

  def wires(self, leaf: Leaf) -> tuple[Wire, ...]:
    """Arrays sent for one leaf."""
    head, *rest = self.links
    found = head.own_wires(leaf)
    for carried in head.carried(leaf):
      found += Encoding(tuple(rest)).wires(carried)
    return found

  def num_bytes(self, leaf: Leaf) -> int:
    """Their size (bytes)."""
    return sum(wire.num_bytes for wire in self.wires(leaf))

  @property
  def keeps_places(self) -> bool:
    """Whether every value is sent, in order."""
    return len(self.links) == 1

  @property
  def is_summable(self) -> bool:
    """Whether a network may add it up in full precision."""
    return self.links == (Dense(),)


def leaf_messages(
  payload: Payload, leaf: Leaf
) -> tuple[tuple[Encoding, Leaf], ...]:
  """The exchanges of one leaf, in turn: what is encoded, and how.

  Args:
    payload: The leaf's payload (`Payload.at`).
    leaf: The leaf.
  """
  head, *rest = links_of(payload)
  if not head.is_projection:
    return ((Encoding((head, *rest)), leaf),)
  found = ()
  for carried in head.carried(leaf):
    found += leaf_messages(Chain(tuple(rest)), carried)
  return found


def wires(payload: Payload, path: str, shape: tuple[int, ...]) -> list[Wire]:
  """Everything one replica encodes of a leaf for one sync."""
  found = leaf_messages(payload.at(path), leaf_of(path, shape))
  return [wire for encoding, leaf in found for wire in encoding.wires(leaf)]


def num_bytes(payload: Payload, shapes: Shapes) -> int:
  """Size of one replica's encoded tree (bytes).

  Args:
    payload: What is sent.
    shapes: Leaf shapes by path.
  """
  return sum(
    wire.num_bytes
    for path, shape in shapes.items()
    for wire in wires(payload, path, shape)
  )
