"""Which part of the parameters belongs to which fragment.

The stacked blocks are taken apart into one leaf a layer, so that a fragment is
nothing but a list of names, and every loop over leaves stays plain.
"""

import numpy as np


def split(params):
  """Turns the tree into a flat dict with one entry a layer and leaf."""
  leaves = {"embed": params["embed"].copy(), "head": params["head"].copy()}
  for layer in range(len(params["blocks"]["b"])):
    leaves[f"blocks/w/{layer}"] = params["blocks"]["w"][layer].copy()
    leaves[f"blocks/b/{layer}"] = np.array(params["blocks"]["b"][layer])
  return leaves


def join(leaves):
  """Undoes `split`."""
  num_layers = 0
  while f"blocks/w/{num_layers}" in leaves:
    num_layers += 1
  layers = range(num_layers)
  return {
    "blocks": {
      "w": np.array([leaves[f"blocks/w/{layer}"] for layer in layers]),
      "b": np.array([leaves[f"blocks/b/{layer}"] for layer in layers]),
    },
    "embed": leaves["embed"].copy(),
    "head": leaves["head"].copy(),
  }


def layers_of(fragment, num_layers, num_fragments, order):
  """The layers of fragment 1, 2, ..., num_fragments - 1."""
  if order == "sequential":
    return list(
      np.array_split(np.arange(num_layers), num_fragments - 1)[fragment - 1]
    )
  assert order == "strided", order
  return [
    layer
    for layer in range(num_layers)
    if 1 + layer % (num_fragments - 1) == fragment
  ]


def names_of(fragment, params, num_fragments, order):
  """The names, as in `split`, of the leaves of one fragment."""
  if num_fragments == 1:
    return list(split(params))
  if fragment == 0:
    return ["embed", "head"]
  names = []
  num_layers = len(params["blocks"]["b"])
  for layer in layers_of(fragment, num_layers, num_fragments, order):
    names += [f"blocks/w/{layer}", f"blocks/b/{layer}"]
  return names
