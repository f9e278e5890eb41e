"""Divides a model's leaves into fragments: leaves that are sent together.

In this module each layer has leaves of its own, "blocks/w/0", "blocks/w/1" and
so on. Fragments 1 to P - 1 divide the layers, and fragment 0 has all other
leaves (embedding, final norm, head). With P = 1 all leaves are in fragment 0.

In the fast code (plan/schedule/fragments.py and outer/fragment_view.py) a leaf
has the values of all layers, and a fragment has some rows of it.
"""

from collections.abc import Iterable

import numpy as np


def layers_of(
  fragment: int, num_layers: int, num_fragments: int, order: str
) -> list[int]:
  """Returns the numbers of the layers of one fragment, ascending.

  For example, five layers and P = 3: fragments 1 and 2 have the layers 0 2 4
  and 1 3 with "strided", and 0 1 2 and 3 4 with "sequential".

  Source: Streaming DiLoCo, arXiv 2501.18512, section 2.2.

  Args:
    fragment: Number of the fragment, from 1 to P - 1.
    num_layers: Number of layers of the model.
    num_fragments: P, which includes fragment 0, the one without layers.
    order: "strided" or "sequential".
  """
  layers = np.arange(num_layers)
  num_groups = num_fragments - 1
  if order == "strided":
    return layers[fragment - 1 :: num_groups].tolist()
  assert order == "sequential", order
  return np.array_split(layers, num_groups)[fragment - 1].tolist()


def names_by_fragment(
  names: Iterable[str], num_fragments: int, order: str = "strided"
) -> list[list[str]]:
  """Divides leaves among fragments.

  Args:
    names: Names of all leaves. The names of the leaves of layer n begin with
      "blocks/" and end in "/n".
    num_fragments: Number of fragments, P. If it is above 1, the model must have
      layers.
    order: How the layers are divided, "strided" or "sequential" (`layers_of`).

  Returns:
    The names of each fragment's leaves, from fragment 0 on.
  """
  if num_fragments == 1:
    return [list(names)]
  layer_of_name = {}
  names_outside_layers = []
  for name in names:
    if name.startswith("blocks/"):
      layer_of_name[name] = int(name.rsplit("/", 1)[1])
    else:
      names_outside_layers.append(name)
  num_layers = 1 + max(layer_of_name.values())
  fragments = [names_outside_layers]
  for fragment in range(1, num_fragments):
    layers = layers_of(fragment, num_layers, num_fragments, order)
    fragments.append(
      [name for name, layer in layer_of_name.items() if layer in layers]
    )
  return fragments
