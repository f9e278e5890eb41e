"""The named methods with the settings of their papers, and this project's own.

Every setting can be given anew, since a test problem is far smaller than a
paper's. The model, the batches and the inner optimizer are always the caller's;
the papers have AdamW inside, MuLoCo has Muon. The fast code has schedules and
rules in plan/schedule/methods.py, codecs and optimizers in config/recipes.py.
"""

import functools
from collections.abc import Callable, Mapping

import numpy as np

from dilocox_jax.reference.exchanges import ErrorFeedback, Lossy, SharedFactors
from dilocox_jax.reference.methods import Result, train, train_on_mean_gradient
from dilocox_jax.reference.optimizers import AdamW, Sgd
from tests.oracles import codecs
from tests.oracles.slices import train_slices


def _in_fp16(name: str, leaf: np.ndarray) -> np.ndarray:
  del name
  return np.clip(leaf, -65504, 65504).astype(np.float16).astype(leaf.dtype)


def _sparse_in_2_bits(name: str, leaf: np.ndarray) -> np.ndarray:
  """Keeps 64 of 4096 values, and of these the sign and one of two sizes."""
  del name
  found = codecs.in_groups(
    leaf.reshape(1, -1),
    4096,
    lambda x: codecs.largest(x, max(1, round(len(x) / 64)))[1],
  )
  is_kept = found != 0
  found[is_kept] = codecs.two_magnitudes(found[is_kept])[1]
  return found.reshape(leaf.shape)


_INT4 = Lossy(codecs.in_blocks(codecs.BY_BITS[4]))
_INT2 = Lossy(codecs.in_blocks(codecs.BY_BITS[2]))
_INT1 = Lossy(codecs.in_blocks(codecs.BY_BITS[1]))
_E3M0 = Lossy(codecs.in_blocks(codecs.powers_of_two))


def _nesterov(learning_rate: float) -> Sgd:
  return Sgd(learning_rate, 0.9, nesterov=True)


PUBLISHED: Mapping[str, Callable[..., Result]] = {
  # The baseline of all the papers.
  "allreduce": train_on_mean_gradient,
  # As restated and tuned in arXiv 2501.18512.
  "diloco": functools.partial(train, sync_interval=30, outer=_nesterov(0.4)),
  # arXiv 2407.07852; 4e-4 is what its 150M model has.
  "open_diloco": functools.partial(
    train,
    sync_interval=500,
    inner=AdamW(4e-4),
    outer=_nesterov(0.7),
    exchange=Lossy(_in_fp16),
  ),
  # arXiv 2508.15706.
  "sparse_loco": functools.partial(
    train,
    sync_interval=30,
    outer=Sgd(1.0),
    exchange=ErrorFeedback(Lossy(_sparse_in_2_bits), decay=0.95),
  ),
  # arXiv 2505.23725.
  "muloco": functools.partial(
    train,
    sync_interval=30,
    outer=_nesterov(0.7),
    exchange=ErrorFeedback(_INT2, decay=0.95),
  ),
  # arXiv 2501.18512. Its 35M model has 6 layers: two fragments of three, and
  # the embeddings are a third one.
  "streaming_diloco": functools.partial(
    train,
    sync_interval=30,
    fragments=3,
    overlap_steps=1,
    rule="mix",
    mixing_alpha=0.5,
    outer=_nesterov(0.4),
    exchange=_E3M0,
  ),
  # arXiv 2502.12996: one round late, a replica's own part fresh.
  "eager": functools.partial(
    train, sync_interval=30, rule="eager", outer=_nesterov(0.4)
  ),
  # arXiv 2506.21263: one round late, rank 64 for 1.3B parameters. Its outer
  # optimizer is not known to us, so OpenDiLoCo's stands in; rule="reset" is
  # its other reading.
  "dilocox": functools.partial(
    train,
    sync_interval=125,
    overlap_steps=125,
    rule="continue",
    outer=_nesterov(0.7),
    exchange=ErrorFeedback(SharedFactors(64, _INT4), against="mean"),
  ),
  # This project's; the inner optimizer is Muon.
  "overlap_loco": functools.partial(
    train_slices,
    sync_interval=16,
    num_fragments=16,
    overlap_steps=1,
    rule="continue",
    outer=Sgd(1.0),
    exchange=ErrorFeedback(_INT1),
  ),
}
