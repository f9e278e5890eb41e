"""Which leaves are sent together.

A model's layers are leaves of their own here, "blocks/w/0", "blocks/w/1" and
so on. Fragment 0 is everything else (embedding, final norm, head), and
fragments 1 to P - 1 share the layers; with P = 1 everything is fragment 0.
"Sliced" fragments have some rows of every leaf, and their own file:
tests/oracles/slices.py.
The fast code stacks layers and picks rows of them: plan/schedule/fragments.py
and outer/fragment_view.py.
"""

from collections.abc import Iterable

import numpy as np


def layers_of(
  fragment: int, num_layers: int, num_fragments: int, order: str
) -> list[int]:
  """The layers of fragment 1, 2, ..., num_fragments - 1.

  Five layers in two fragments are 0 2 4 and 1 3 if "strided", and 0 1 2 and
  3 4 if "sequential". Source: Streaming DiLoCo, arXiv 2501.18512, section 2.2.

  Args:
    fragment: Number of the fragment, from 1.
    num_layers: Layers of the model.
    num_fragments: P, fragment 0 included.
    order: "strided" or "sequential".
  """
  layers = np.arange(num_layers)
  groups = num_fragments - 1
  if order == "strided":
    return layers[fragment - 1 :: groups].tolist()
  assert order == "sequential", order
  return np.array_split(layers, groups)[fragment - 1].tolist()


def names_by_fragment(
  names: Iterable[str], num_fragments: int, order: str = "strided"
) -> list[list[str]]:
  """Divides leaves among fragments.

  Args:
    names: Names of all leaves; those of layer n begin with "blocks/" and end
      in "/n".
    num_fragments: P.
    order: "strided" or "sequential".
  """
  if num_fragments == 1:
    return [list(names)]
  layer_of = {
    name: int(name.rsplit("/", 1)[1]) if name.startswith("blocks/") else None
    for name in names
  }
  num_layers = 1 + max(n for n in layer_of.values() if n is not None)
  parts = [
    layers_of(p, num_layers, num_fragments, order)
    for p in range(1, num_fragments)
  ]
  return [
    [name for name, layer in layer_of.items() if layer in layers]
    for layers in ([None], *parts)
  ]
