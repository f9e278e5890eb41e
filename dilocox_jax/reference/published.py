"""The named methods, each with the settings of its paper.

Every setting can be given anew, since a test problem is far smaller than a
paper's. The model, the batches and the inner optimizer are always the caller's,
and so is what is sent: `exchange`. The fast code has schedules and rules in
plan/schedule/methods.py, and codecs and optimizers in config/recipes.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dilocox_jax.reference.exchanges import Leaves
from dilocox_jax.reference.fragments import names_by_fragment
from dilocox_jax.reference.methods import (
  LossAndGradient,
  Result,
  train,
  train_on_mean_gradient,
)
from dilocox_jax.reference.optimizers import Sgd


def _nesterov(learning_rate: float) -> Sgd:
  return Sgd(learning_rate, 0.9, nesterov=True)


def _streaming(
  loss_and_gradient: LossAndGradient,
  params: Leaves,
  batches: Sequence[Sequence[Any]],
  *,
  num_fragments: int = 3,
  order: str = "strided",
  **settings: Any,
) -> Result:
  """Divides the leaves by their names, then trains.

  The paper's 35M model has 6 layers: two fragments of three layers, and the
  embeddings are a third one.
  """
  fragments = names_by_fragment(params, num_fragments, order)
  return train(
    loss_and_gradient, params, batches, fragments=fragments, **settings
  )


PUBLISHED: Mapping[str, Callable[..., Result]] = {
  # The baseline of all the papers.
  "allreduce": train_on_mean_gradient,
  # As restated and tuned in arXiv 2501.18512.
  "diloco": functools.partial(train, sync_interval=30, outer=_nesterov(0.4)),
  # arXiv 2407.07852.
  "open_diloco": functools.partial(
    train, sync_interval=500, outer=_nesterov(0.7)
  ),
  # arXiv 2501.18512.
  "streaming_diloco": functools.partial(
    _streaming,
    sync_interval=30,
    overlap_steps=1,
    rule="mix",
    mixing_alpha=0.5,
    outer=_nesterov(0.4),
  ),
  # arXiv 2502.12996: one round late, a replica's own part fresh.
  "eager": functools.partial(
    train, sync_interval=30, rule="eager", outer=_nesterov(0.4)
  ),
  # arXiv 2506.21263: one round late. Its outer optimizer is not known to us,
  # so OpenDiLoCo's stands in; its other reading is rule="reset".
  "dilocox": functools.partial(
    train,
    sync_interval=125,
    overlap_steps=125,
    rule="continue",
    outer=_nesterov(0.7),
  ),
}
