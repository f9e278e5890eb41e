"""What a config's sections ask for, in plain float64.

Trees are flat dicts of leaves by path, "/" between keys; leaves whose path
begins with "blocks/" have a layer axis in front. A codec's settings are all
given: the parts' own defaults are theirs.
"""

import math

import numpy as np

from . import codecs
from .optimizers import AdamW, Sgd


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


class Exchange:
  """Averages replicas' values as the exchange and codec sections say.

  All replicas take part, and codecs round to the nearest.
  """

  def __init__(self, exchange, codec):
    self.exchange, self.codec = exchange, codec
    self.residuals = None

  def average(self, values):
    """From one tree a replica to the mean and what each one sent."""
    wanted = values
    if self.exchange.error_feedback and self.residuals:
      wanted = [
        {name: v[name] + owed[name] for name in v}
        for v, owed in zip(values, self.residuals, strict=True)
      ]
    mean, sent = {}, [{} for _ in values]
    for name in values[0]:
      each = [v[name] for v in wanted]
      mean[name], owns = self.reduced(name, each)
      for own, tree in zip(owns, sent, strict=True):
        tree[name] = own
    self.residuals = [
      {name: self.kept(v[name], mean[name], own[name]) for name in v}
      for v, own in zip(wanted, sent, strict=True)
    ]
    return mean, sent

  def reduced(self, name, each):
    """The mean of one leaf, and what was received of every replica."""
    layers = len(each[0]) if name.startswith("blocks/") else 1
    shape = each[0].shape
    if self.codec.name == "float32":
      return sum(each) / len(each), each
    if self.exchange.collective == "all_gather":
      owns = [
        lossy(self.codec, values.reshape(layers, -1), shape[-1]).reshape(shape)
        for values in each
      ]
      return sum(owns) / len(owns), owns
    assert self.exchange.collective == "reduce_scatter"
    # A chunk a replica; the owner of one rounds its mean once more.
    width = -(-each[0].size // len(each))
    padding = len(each) * width - each[0].size
    owns = [
      lossy(self.codec, np.pad(v.ravel(), (0, padding)).reshape(-1, width))
      for v in each
    ]
    mean = lossy(self.codec, sum(owns) / len(owns))
    mean, *owns = (
      x.ravel()[: each[0].size].reshape(shape) for x in (mean, *owns)
    )
    return mean, owns

  def kept(self, wanted, mean, own):
    """What is owed of one leaf after an exchange, as it is stored."""
    seen = {"own": own, "mean": mean}[self.exchange.feedback_against]
    residual = self.exchange.feedback_decay * (wanted - seen)
    if self.exchange.feedback_dtype == "float32":
      return residual
    if self.exchange.feedback_dtype == "bfloat16":
      return np.vectorize(codecs.bfloat16)(residual)
    assert self.exchange.feedback_dtype == "int8"
    blocks = in_groups(
      residual.reshape(1, -1), 128, lambda x: codecs.nearest(x, 8)[1]
    )
    return blocks.reshape(residual.shape)


def lossy(codec, layers, row=None):
  """What is received of [layers, values] under a codec section.

  Args:
    codec: The section.
    layers: The values.
    row: Values along the last axis, if the scale is a row's.
  """
  if codec.name == "top_k":

    def round_group(values):
      count = max(1, round(codec.top_k_fraction * len(values)))
      return codecs.top_k(values, count)[1]

    return in_groups(layers, codec.top_k_block_size, round_group)
  if codec.name == "e3m0":
    return in_groups(
      layers, codec.block_size, lambda x: codecs.powers_of_two(x)[1]
    )
  assert codec.name == "int" and codec.rounding == "nearest", codec
  size = {"block": codec.block_size, "row": row, "tensor": layers.shape[1]}
  ways = {2: codecs.two_magnitudes, 1: codecs.signs}
  nearest = ways.get(codec.bits, lambda x: codecs.nearest(x, codec.bits))
  return in_groups(layers, size[codec.scale], lambda x: nearest(x)[1])


def in_groups(layers, size, round_group):
  """Every layer in equally long groups of `size` values at most."""
  groups = -(-layers.shape[1] // size)
  width = -(-layers.shape[1] // groups)
  found = []
  for values in layers:
    padded = np.pad(values, (0, groups * width - len(values)))
    parts = [round_group(list(part)) for part in padded.reshape(groups, -1)]
    found.append(np.concatenate(parts)[: len(values)])
  return np.array(found)


def rounds(config, params, moves):
  """Trains by rounds in which replicas wait: the local steps are given.

  Args:
    config: Sections `outer`, `exchange` and `codec`.
    params: Where all begin.
    moves: By round, for every replica what its local steps subtract.

  Yields:
    By round the outer parameters, and each replica's.
  """
  exchange = Exchange(config.exchange, config.codec)
  optimizer = outer_optimizer(config.outer)
  outer = params
  own = [dict(params) for _ in moves[0]]
  for each in moves:
    deltas = []
    for w, move in zip(own, each, strict=True):
      deltas.append({n: outer[n] - (w[n] - move[n]) for n in w})
    mean, sent = exchange.average(deltas)
    outer = optimizer.step(outer, mean)
    own = [dict(outer) for _ in own]
    if config.exchange.keep_unsent:
      for w, delta, part in zip(own, deltas, sent, strict=True):
        w.update({n: w[n] - (delta[n] - part[n]) for n in w})
    yield outer, own


def low_rank(matrix, start, power_iterations):
  """A matrix in the basis that power iterations from a start have found."""
  factor = start
  for _ in range(power_iterations):
    basis, _ = np.linalg.qr(matrix @ factor)
    factor = matrix.T @ basis
  return basis @ factor.T
