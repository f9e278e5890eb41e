"""Which leaves are sent together.

A model's layers are leaves of their own here, "blocks/w/0", "blocks/w/1" and
so on. Fragment 0 is everything else (embedding, final norm, head), and
fragments 1 to P - 1 share the layers; with P = 1 everything is fragment 0.
"Balanced" fragments are about equally large, so fragment 0 has layers as well.
"Sliced" fragments have some rows of every leaf: reference/slices.py.
The fast code stacks layers and picks rows of them: plan/schedule/fragments.py
and outer/partition.py.
"""

import math
from collections.abc import Iterable

import numpy as np

from dilocox_jax.reference.exchanges import Arrays


def layers_of(
  fragment: int, num_layers: int, num_fragments: int, order: str
) -> list[int]:
  """The layers of fragment 1, 2, ..., num_fragments - 1.

  Five layers in two fragments are 0 2 4 and 1 3 if "strided", and 0 1 2 and
  3 4 if "sequential". Source: Streaming DiLoCo, arXiv 2501.18512, section 2.2.
  """
  layers, groups = np.arange(num_layers), num_fragments - 1
  if order == "strided":
    return layers[fragment - 1 :: groups].tolist()
  assert order == "sequential", order
  return np.array_split(layers, groups)[fragment - 1].tolist()


def balanced(
  num_layers: int, num_fragments: int, rest_in_layers: float
) -> list[list[int]]:
  """The layers of all fragments, if fragment 0 has layers too.

  All fragments but fragment 0 have the same number of layers, or one less at
  the end. Of all ways to do so the one is taken whose largest fragment is
  smallest. Layers are then dealt like cards. Source: ours.

  Four layers, two fragments and a rest as large as 0.4 layers: fragment 0 has
  layers 0 and 2 (and the rest, which makes it 2.4 layers large), fragment 1
  has 1 and 3.
  """
  groups = num_fragments - 1
  ways = []
  for width in range(1, math.ceil(num_layers / groups) + 1):
    first = max(num_layers - groups * width, 0)
    empty = max(groups * width - num_layers, 0)
    ways.append((max(rest_in_layers + first, width), empty, first, width))
  _, _, first, width = min(ways)
  hands: list[list[int]] = [[] for _ in range(num_fragments)]
  cards = list(range(num_layers))
  while cards:
    for number, hand in enumerate(hands):
      if cards and len(hand) < (width if number else first):
        hand.append(cards.pop(0))
  return hands


def rest_in_layers(params: Arrays) -> float:
  """The size of all that is outside the layers, in layers.

  Args:
    params: Arrays by name; those of layer n begin with "blocks/" and end in
      "/n".
  """
  layers = {k: v for k, v in params.items() if k.startswith("blocks/")}
  in_layers = sum(v.size for v in layers.values())
  num_layers = len({name.rsplit("/", 1)[1] for name in layers})
  total = sum(v.size for v in params.values())
  return num_layers * (total - in_layers) / in_layers


def names_by_fragment(
  names: Iterable[str],
  num_fragments: int,
  order: str = "strided",
  rest_in_layers: float = 0.0,
) -> list[list[str]]:
  """Divides leaves among fragments.

  Args:
    names: Names of all leaves; those of layer n begin with "blocks/" and end
      in "/n".
    num_fragments: P.
    order: "strided", "sequential" or "balanced".
    rest_in_layers: Size of all that is outside the layers, in layers; for
      "balanced" only.
  """
  if num_fragments == 1:
    return [list(names)]
  layer_of = {
    name: int(name.rsplit("/", 1)[1]) if name.startswith("blocks/") else None
    for name in names
  }
  num_layers = 1 + max(n for n in layer_of.values() if n is not None)
  if order == "balanced":
    first, *others = balanced(num_layers, num_fragments, rest_in_layers)
  else:
    numbers = range(1, num_fragments)
    first = []
    others = [layers_of(p, num_layers, num_fragments, order) for p in numbers]
  return [
    [name for name, layer in layer_of.items() if layer in layers]
    for layers in ([None, *first], *others)
  ]
