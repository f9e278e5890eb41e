"""The nano transformer, assembled from a config as a run is."""

from typing import Any

import jax
import numpy as np

from dilocox_jax.config import RunConfig, from_mapping, to_plan
from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.training import build

SEQUENCE_LENGTH = 16


def config(
  *,
  num_steps,
  num_replicas=3,
  layout="stacked",
  batch_size=4,
  model=None,
  inner=None,
  outer=None,
  **sync,
) -> RunConfig:
  return from_mapping(
    {
      "total_steps": num_steps,
      "data": {"batch_size": batch_size, "sequence_length": SEQUENCE_LENGTH},
      # One layer a scan step compiles fastest.
      "model": {"preset": "nano", "scan_unroll": 1, **(model or {})},
      "inner": {"warmup_steps": 2, **(inner or {})},
      "outer": outer or {},
      "sync": sync,
      "exchange": {"codec": "float32"},  # Not the method's own.
      "mesh": {"num_replicas": num_replicas, "layout": layout},
    }
  )


def tokens(config: RunConfig, seed=0):
  """Tokens [M, steps, B, L + 1]; each replica repeats motifs of its own."""
  rng = np.random.default_rng(seed)
  count = config.mesh.num_replicas
  shape = (config.total_steps, config.data.batch_size, SEQUENCE_LENGTH + 1)
  motifs = rng.integers(0, config.model.shape.vocab_size, [count, 5])
  starts = rng.integers(0, 5, [count, *shape[:2], 1])
  places = (starts + np.arange(SEQUENCE_LENGTH + 1)) % 5
  return np.stack(
    [motif[place] for motif, place in zip(motifs, places, strict=True)]
  ).astype(np.int32)


def params(programs: build.Programs):
  return programs.model.init(jax.random.key(0))


def first_state(programs: build.Programs):
  start = params(programs)
  return programs.rounds.init(start, programs.steps.optimizer.init(start))


def train(config: RunConfig, batches=None) -> tuple[build.Programs, Any, Any]:
  """Runs all segments; returns (programs, state, metrics of every step)."""
  programs, plan = build.programs(config), to_plan.run_plan(config)
  batches = tokens(config) if batches is None else batches
  is_data_parallel = plan.local_start == plan.total_steps
  if is_data_parallel:
    state = programs.steps.init(params(programs))
  else:
    state = first_state(programs)
  seen = []
  for segment in plan.segments():
    part = batches[:, segment.start : segment.stop]
    if isinstance(state, SharedState):
      state, metrics = programs.steps.steps(state, part)
    else:
      state, metrics, _ = programs.rounds.run(state, part)
    seen.append(jax.device_get(metrics))
  metrics = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *seen)
  return programs, state, metrics
