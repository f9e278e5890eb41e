"""What the section `exchange` of a config asks for, in plain float64.

Trees are flat dicts of leaves by path, "/" between keys; leaves whose path
begins with "blocks/" have a layer axis in front.
"""

import math

from dilocox_jax.codecs.quantize import E3M0, Float, Int
from dilocox_jax.codecs.sparse import TopK
from dilocox_jax.reference.exchanges import (
  ErrorFeedback,
  Lossy,
  Scattered,
  leaf_of_slices,
  slices_of,
)
from tests.oracles import codecs


def lossy_mean(exchange, num_replicas):
  """Averages replicas' values as the exchange section says.

  All replicas take part, and codecs round to the nearest.
  """
  codec = exchange.named_codec
  scatters = exchange.collective == "reduce_scatter"

  def width(name, leaf):
    layer = leaf[0] if name.startswith("blocks/") else leaf
    return row_width(codec, layer.shape)

  def received(name, leaf, codec=codec):
    if codec == Float():
      return leaf
    assert exchange.collective in ("all_gather", "reduce_scatter")
    row = width(name, leaf)
    if scatters:
      # A slice a replica; the owner of one rounds its mean once more.
      sent = lossy(codec, slices_of(leaf, num_replicas, row), row)
      return leaf_of_slices(sent, leaf.shape)
    layers = len(leaf) if name.startswith("blocks/") else 1
    return lossy(codec, leaf.reshape(layers, -1), row).reshape(leaf.shape)

  def of_means(name, leaf):
    return received(name, leaf, getattr(codec, "of_means", codec))

  plain = Lossy(received, of_means if scatters else None)
  shares_add_up = exchange.feedback and exchange.against == "own"
  if scatters and (exchange.keep_unsent or shares_add_up):
    widths = {}

    def wide(name, leaf):
      widths[name] = width(name, leaf)
      return widths[name]

    plain = Scattered(
      lambda n, slices: lossy(codec, slices, widths[n]),
      wide,
      lambda n, slices: lossy(codec.of_means, slices, widths[n]),
    )
  if not exchange.feedback:
    return plain
  return ErrorFeedback(plain, exchange.feedback, exchange.against)


def row_width(codec, shape):
  """Values that are coded together, of a layer of some shape."""
  size = math.prod(shape)
  if isinstance(codec, TopK | E3M0) or getattr(codec, "scale", "") == "block":
    return -(-size // -(-size // codec.block_size))
  by_row = getattr(codec, "scale", "row") == "row"
  return (shape[-1] if shape else 1) if by_row else size


def lossy(codec, layers, width):
  """What is received of [layers, values].

  Args:
    codec: The codec.
    layers: The values.
    width: Values that are coded together.
  """
  if codec == Float():
    return layers
  if isinstance(codec, TopK):
    count = max(1, round(codec.fraction * width))
    return codecs.in_groups(
      layers, width, lambda x: codecs.largest(x, min(count, len(x)))[1]
    )
  if isinstance(codec, E3M0):
    return codecs.in_groups(layers, width, lambda x: codecs.powers_of_two(x)[1])
  assert isinstance(codec, Int), codec
  rounding = codecs.BY_BITS[codec.bits]
  return codecs.in_groups(layers, width, lambda x: rounding(x)[1])
