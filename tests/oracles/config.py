"""What a config's sections ask for, in plain float64.

Trees are flat dicts of leaves by path, "/" between keys; leaves whose path
begins with "blocks/" have a layer axis in front.
"""

import math

import numpy as np

from dilocox_jax.codecs.quantize import E3M0, Float, Int
from dilocox_jax.codecs.sparse import TopK
from dilocox_jax.reference.exchanges import (
  ErrorFeedback,
  Lossy,
  Scattered,
  leaf_of_slices,
  slices_of,
)
from dilocox_jax.reference.methods import train
from dilocox_jax.reference.optimizers import AdamW, Sgd
from tests.oracles import codecs


def learning_rate(inner, total_steps):
  """Learning rate by the number of steps taken before."""
  peak, final = inner.learning_rate, inner.learning_rate * inner.final_fraction
  rest = total_steps - inner.warmup_steps
  decay = min(rest, round(0.2 * total_steps))  # Of wsd, the last fifth.

  def rate(count):
    if count < inner.warmup_steps:
      return peak * count / inner.warmup_steps
    if inner.schedule == "constant":
      return peak
    if inner.schedule == "cosine":
      angle = math.pi * (count - inner.warmup_steps) / rest
      return final + (peak - final) * (1 + math.cos(angle)) / 2
    assert inner.schedule == "wsd", inner.schedule
    passed = max(0, count - (total_steps - decay)) / decay
    return peak + (final - peak) * passed

  return rate


def clipped(grads, limit):
  """Gradients whose global norm is no more than a limit; 0 is none."""
  norm = math.sqrt(sum(np.sum(np.square(g)) for g in grads.values()))
  if not limit or norm <= limit:
    return grads
  return {name: g * (limit / norm) for name, g in grads.items()}


class Inner:
  """Clips, then steps: all settings are the section's."""

  def __init__(self, inner, total_steps):
    rate = learning_rate(inner, total_steps)
    self.clip_norm = inner.clip_norm
    if inner.optimizer == "sgd":
      self.optimizer = Sgd(rate, inner.momentum)
    else:
      assert inner.optimizer == "adamw", inner.optimizer
      self.optimizer = AdamW(
        rate, inner.b1, inner.b2, weight_decay=inner.weight_decay
      )

  def step(self, params, grads):
    return self.optimizer.step(params, clipped(grads, self.clip_norm))


def outer_optimizer(outer):
  """The outer section's optimizer, for one fragment."""
  if outer.optimizer == "sgd":
    return Sgd(outer.learning_rate, outer.momentum, outer.nesterov)
  assert outer.optimizer == "adamw" and not outer.nesterov, outer
  return AdamW(outer.learning_rate)


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
  assert isinstance(codec, Int) and codec.rounding == "nearest", codec
  rounding = codecs.BY_BITS[codec.bits]
  return codecs.in_groups(layers, width, lambda x: rounding(x)[1])


def rounds(config, params, moves):
  """Trains by rounds in which replicas wait: the local steps are given.

  Args:
    config: Sections `outer` and `exchange`.
    params: Where all begin.
    moves: By round, for every replica what its local steps subtract.

  Yields:
    By round the outer parameters, and each replica's.
  """
  for end in range(1, len(moves) + 1):
    run = train(
      lambda params, move: (0.0, move),
      params,
      list(zip(*moves[:end], strict=True)),
      inner=Sgd(1.0),
      outer=outer_optimizer(config.outer),
      sync_interval=1,
      exchange=lossy_mean(config.exchange, len(moves[0])),
      keep_unsent=config.exchange.keep_unsent,
      flush=False,
    )
    yield run.theta, run.params
