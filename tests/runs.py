"""Whole runs of the nano model, short enough to be made by the dozen."""

import dataclasses
import functools
import json
import pathlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax import report
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.models.loss import LossModel
from dilocox_jax.training import build, run_text, states
from dilocox_jax.training.checkpoint import Checkpoints
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.training.trainer import Trainer

BATCH_SIZE = 2
SEQUENCE_LENGTH = 16
# A run of the nano model for a command line: a few seconds.
SMALL_FLAGS = (
  "--config.data.source=synthetic",
  "--config.data.batch_size=2",
  "--config.data.sequence_length=16",
  "--config.model.preset=nano",
  "--config.model.scan_unroll=1",
  "--config.total_steps=12",
  "--config.inner.warmup_steps=2",
  "--config.sync.sync_interval=3",
  "--config.evaluation.num_sequences=4",
)


def _tiny_loss(params, tokens):
  """Two products, with a tanh behind each, guess the next token's row."""
  x = params["table"][tokens[:, :-1].reshape(-1)]
  for kernel in params["blocks"]["kernel"]:
    x = jnp.tanh(x @ kernel)
  return jnp.mean((x - params["table"][tokens[:, 1:].reshape(-1)]) ** 2)


def _tiny_init(key):
  keys = jax.random.split(key)
  kernels = jax.random.normal(keys[0], (2, 8, 8))
  table = jax.random.normal(keys[1], (256, 8))
  return {"table": table, "blocks": {"kernel": kernels}}


# A model whose programs are made in half the time of a transformer's.
TINY = Overrides(model=LossModel(_tiny_init, _tiny_loss))


class Killed(Exception):
  """Stands for the end of a process."""


_SIZES = {"num_layers", "model_dim", "num_heads", "ff_dim"}


def settings(
  *,
  total_steps=21,
  num_replicas=2,
  layout="stacked",
  model=None,
  inner=None,
  outer=None,
  evaluation=None,
  checkpoint=None,
  data=None,
  mesh=None,
  exchange=None,
  adaptive=None,
  **sync,
) -> RunConfig:
  """A run of rounds of three steps that is evaluated and saved every six."""
  schedule = {"method": "dilocox", "sync_interval": 3}
  preset = {"preset": "nano"}
  if model and _SIZES <= model.keys():
    preset = {}  # Nothing of it would be left.
  return from_mapping(
    {
      "total_steps": total_steps,
      "data": {
        "source": "synthetic",
        "batch_size": BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        **(data or {}),
      },
      # One layer a scan step compiles fastest.
      "model": {**preset, "scan_unroll": 1, **(model or {})},
      "inner": {"warmup_steps": 2, **(inner or {})},
      "outer": outer or {},
      "sync": schedule | sync,
      # What is not asked for is plain, whatever the method would bring.
      "exchange": {"codec": "float32", "feedback": 0.0, **(exchange or {})},
      "adaptive": {"mode": "off", **(adaptive or {})},
      "mesh": {"num_replicas": num_replicas, "layout": layout, **(mesh or {})},
      "evaluation": {
        "interval_steps": 6,
        "num_sequences": 4,
        **(evaluation or {}),
      },
      "checkpoint": {"interval_steps": 6, **(checkpoint or {})},
    }
  )


def programs(config: RunConfig, overrides: Overrides = NO_OVERRIDES, *given):
  """A config's programs, compiled once for all tests of a process."""
  plain = RunConfig()
  config = dataclasses.replace(
    config, evaluation=plain.evaluation, checkpoint=plain.checkpoint
  )
  return _programs(config, overrides, *given)


def share_programs(patch: Any) -> None:
  """Lets runs with equal configs and names of overrides share programs.

  Args:
    patch: pytest's `MonkeyPatch`, which ends it.
  """
  made = {}
  make = build.programs

  def programs(config, overrides=NO_OVERRIDES, *rest):
    key = config, *overrides.names
    if key not in made:
      made[key] = make(config, overrides, *rest)
    return made[key]

  patch.setattr(build, "programs", programs)


_programs = functools.cache(build.programs)
_load = functools.cache(run_text.corpus)


def trainer(config: RunConfig, workdir, **options) -> Trainer:
  """A trainer whose text and programs were made before, if they were."""
  with (
    mock.patch.object(run_text, "corpus", _load),
    mock.patch.object(build, "programs", programs),
  ):
    return Trainer(config, pathlib.Path(workdir), **options)


def run(made: Trainer) -> None:
  """Takes a run to its end, without the pictures of its report."""
  page = made.workdir / "report.md"
  with mock.patch.object(report, "write_report", return_value=page):
    made.run()


def train(
  config: RunConfig, workdir, *, until: int | None = None, **options
) -> Trainer:
  """Takes a run to its end, or kills it before the step after `until`.

  Returns:
    The trainer.
  """
  made = trainer(config, workdir, **options)
  if until is None:
    run(made)
    return made
  made._dispatch = killed(until, made._dispatch)
  try:
    run(made)
  except Killed:
    return made
  raise AssertionError(f"the run ended before step {until}")


def killed(until: int, dispatch: Any = Trainer._dispatch) -> Any:
  """What dispatches a trainer's segments, and dies before the step after."""

  def dispatch_or_die(*given):
    if given[-1].start >= until:
      raise Killed
    return dispatch(*given)

  return dispatch_or_die


def rows(workdir, kind: str | None = None) -> list[dict]:
  """The rows of metrics.jsonl, or those of one kind."""
  every = read_rows(pathlib.Path(workdir) / "metrics.jsonl")
  return [row for row in every if kind in (None, row["kind"])]


def metrics_text(workdir) -> bytes:
  """The bytes of metrics.jsonl."""
  return (pathlib.Path(workdir) / "metrics.jsonl").read_bytes()


def saved(workdir) -> tuple[Any, dict[str, Any]]:
  """The newest checkpoint: state and record."""
  path = pathlib.Path(workdir)
  config = from_mapping(json.loads((path / "config.json").read_text()))
  checkpoints = Checkpoints(path / "checkpoints", read_only=True)
  try:
    restored = checkpoints.restore(
      lambda record: states.abstract(
        programs(config, TINY if record["overrides"] else NO_OVERRIDES),
        record["phase"],
        in_flight=record["in_flight"],
      )
    )
  finally:
    checkpoints.close()
  assert restored, f"{path} has no whole checkpoint"
  return restored


def assert_same_bits(one, other) -> None:
  """Two trees of arrays have one structure and the same bytes."""
  assert jax.tree.structure(one) == jax.tree.structure(other)
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  for a, b in jax.device_get(list(pairs)):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert (
      np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )


def files(directory) -> dict[str, bytes]:
  """Every file below a directory with its content."""
  root = pathlib.Path(directory)
  return {
    str(path.relative_to(root)): path.read_bytes()
    for path in sorted(root.rglob("*"))
    if path.is_file()
  }


def outer_step(config, overrides=NO_OVERRIDES):
  """The outer step of a config's run."""
  aggregator = build.run_exchange(config, overrides).aggregator
  return build.outer_step(config, overrides, aggregator)
