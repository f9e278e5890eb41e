"""The named methods: one call of the general loop each, as their papers set it.

Every setting can be overridden by name, since a test problem is far smaller
than a paper's. `inner` and `num_steps` are always the caller's.
"""

from . import allreduce as data_parallel
from . import sync
from .optimizers import Sgd


def nesterov(learning_rate, momentum=0.9):
  return Sgd(learning_rate, momentum, nesterov=True)


def _run(problem, settings, overrides):
  defaults = {
    "num_fragments": 1,
    "fragment_order": "sequential",
    "overlap_steps": 0,
    "mixing_alpha": 0.0,
  }
  return sync.simulate(*problem, **{**defaults, **settings, **overrides})


def allreduce(params0, A, y, *, inner, num_steps):
  """Mean of gradients at every step: the baseline of all the papers."""
  return data_parallel.simulate(params0, A, y, inner=inner, num_steps=num_steps)


def diloco(params0, A, y, **overrides):
  """DiLoCo as restated and tuned in arXiv 2501.18512: H = 30, lr 0.4."""
  settings = {
    "rule": "synchronous",
    "sync_interval": 30,
    "outer": nesterov(0.4),
  }
  return _run((params0, A, y), settings, overrides)


def open_diloco(params0, A, y, **overrides):
  """OpenDiLoCo, arXiv 2407.07852: DiLoCo with H = 500, lr 0.7."""
  settings = {
    "rule": "synchronous",
    "sync_interval": 500,
    "outer": nesterov(0.7),
  }
  return _run((params0, A, y), settings, overrides)


def streaming_diloco(params0, A, y, **overrides):
  """Streaming DiLoCo, arXiv 2501.18512: strided, tau = 1, alpha = 0.5.

  The 35M model's 6 layers make two fragments of three, and the embeddings a
  third one.
  """
  settings = {
    "rule": "mix",
    "sync_interval": 30,
    "num_fragments": 3,
    "fragment_order": "strided",
    "overlap_steps": 1,
    "mixing_alpha": 0.5,
    "outer": nesterov(0.4),
  }
  return _run((params0, A, y), settings, overrides)


def eager(params0, A, y, *, sync_interval=30, **overrides):
  """Eager updates, arXiv 2502.12996: one round late, one's own part fresh."""
  settings = {"rule": "eager", "outer": nesterov(0.4)}
  return _delayed((params0, A, y), settings, sync_interval, overrides)


def dilocox(params0, A, y, *, rule, sync_interval=125, **overrides):
  """DiLoCoX, arXiv 2506.21263, uncompressed: one round late; H = 125.

  Its outer optimizer is not known to us, so OpenDiLoCo's stands in. `rule` is
  the reading, "reset" or "continue".
  """
  settings = {"rule": rule, "outer": nesterov(0.7)}
  return _delayed((params0, A, y), settings, sync_interval, overrides)


def _delayed(problem, settings, sync_interval, overrides):
  delay = {"sync_interval": sync_interval, "overlap_steps": sync_interval}
  return _run(problem, {**settings, **delay}, overrides)
