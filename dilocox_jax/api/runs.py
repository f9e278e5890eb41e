"""Runs from Python: train one, read one back, say what one would cost."""

import dataclasses
import functools
import os
import pathlib
from typing import Any

import optax

from dilocox_jax import report
from dilocox_jax.api import argument_kinds as kinds
from dilocox_jax.api.simulation_setup import Options, set_up
from dilocox_jax.config import RunConfig
from dilocox_jax.config.run import from_mapping
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.models.flax_modules import as_loss_model
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.simulate.analytic import Outcome, run_time
from dilocox_jax.training import resume, run_lock, start
from dilocox_jax.training.parts import NO_PARTS, Parts
from dilocox_jax.training.trainer import Trainer
from dilocox_jax.trees import Aggregator, Tree


@dataclasses.dataclass(frozen=True)
class Run:
  """A run directory, read back.

  Attributes:
    workdir: The run directory.
    parts: Parts that were handed in to the run; without the data.
  """

  workdir: pathlib.Path
  parts: Parts = NO_PARTS

  def __repr__(self) -> str:
    """Says on one line what was trained; the directory alone if it is gone."""
    try:
      return f"Run({self.metrics.summary})"
    except (OSError, ValueError, RecordError):
      return f"Run({self.workdir})"

  def _repr_html_(self) -> str:
    """Shows the outcome as a table in a notebook."""
    return self.metrics._repr_html_()

  @functools.cached_property
  def metrics(self) -> LoadedRun:
    """Losses, bytes and times: `.rounds` and `.evaluations` are its rows."""
    return report.load_run(self.workdir)

  @functools.cached_property
  def config(self) -> RunConfig:
    """Config of the run."""
    return from_mapping(self.metrics.config)

  @functools.cached_property
  def params(self) -> Tree:
    """Outer parameters of the newest checkpoint, without a replica axis.

    Raises:
      RefusedError: If there is no checkpoint, or a part that was handed in to
        the run is missing here.
    """
    resume.check_same_parts(self.metrics.record, self.parts)
    return start.saved_outer_params(self.workdir, self.parts)


def train(
  config: RunConfig,
  workdir: str | os.PathLike = "runs/train",
  *,
  model: Any = None,
  data: Corpus | None = None,
  inner_optimizer: optax.GradientTransformation | None = None,
  outer_optimizer: optax.GradientTransformation | None = None,
  exchange: Aggregator | None = None,
) -> Run:
  """Trains a run to its end, or continues the one in the directory.

  What is handed in takes the place of what the config names, and `run.json`
  says which parts those are.

  Args:
    config: Config of the run.
    workdir: The run directory.
    model: Model to train: a `LossModel`, a linen module, or a function from
      `nnx.Rngs` to an NNX module (`models.flax_modules`). The plan's bytes are
      then those of its parameters.
    data: Training and validation tokens.
    inner_optimizer: Optimizer of the replicas, with its own learning rate.
    outer_optimizer: Optimizer of the outer parameters.
    exchange: Averages one fragment over the replicas. The bytes that the run
      reports are still those of the config's codec.

  Returns:
    The run, whose `metrics` and `params` are read when they are first used.

  Raises:
    TypeError: If an argument is of another kind than the one that is meant.
    ValueError: If a part cannot be built, or the directory holds another run.
    BusyError: If another run is at work in the directory.
    TrainingStoppedError: If a value is not finite.
  """
  kinds.check_config(config)
  parts = _parts(model, data, inner_optimizer, outer_optimizer, exchange)
  path = pathlib.Path(workdir)
  trainer = Trainer(config, path, "dilocox_jax.train", parts=parts)
  with run_lock.held(path):
    trainer.run()
  return Run(path, parts)


def _parts(
  model: Any, data: Any, inner: Any, outer: Any, exchange: Any
) -> Parts:
  """Returns what was handed in, once each part is of its kind."""
  if data is not None:
    kinds.check_data(data)
  for what, part in (("inner_optimizer", inner), ("outer_optimizer", outer)):
    if part is not None:
      kinds.check_optimizer(what, part)
  if exchange is not None:
    kinds.check_exchange(exchange)
  loss_model = None if model is None else as_loss_model(model)
  return Parts(loss_model, data, inner, outer, exchange)


def load(
  workdir: str | os.PathLike,
  *,
  model: Any = None,
  inner_optimizer: optax.GradientTransformation | None = None,
  outer_optimizer: optax.GradientTransformation | None = None,
  exchange: Aggregator | None = None,
) -> Run:
  """Reads a run directory: `.config`, `.metrics` and `.params`.

  Args:
    workdir: The run directory.
    model: Model that was handed in, if one was; only `.params` needs it, and
      likewise the parts below.
    inner_optimizer: Inner optimizer that was handed in.
    outer_optimizer: Outer optimizer that was handed in.
    exchange: Exchange that was handed in.

  Raises:
    RecordError: If the directory holds no run.
    TypeError: If a part is of another kind than the one that is meant.
  """
  parts = _parts(model, None, inner_optimizer, outer_optimizer, exchange)
  run = Run(pathlib.Path(workdir), parts)
  _ = run.metrics  # A wrong directory is reported here and not at first use.
  return run


def estimate(
  config: RunConfig, cluster: str, *, step_s: float | None = None
) -> Outcome:
  """Says what a run would cost on a cluster, by formula and without training.

  Args:
    config: Config of the run.
    cluster: Name of a cluster preset, or path of a cluster file.
    step_s: Duration of an inner step (seconds); None derives it from the
      operations of a step and the cluster's devices.

  Returns:
    Simulated times: `total_s`, `utilisation` (0 to 1), `sent_bytes` of one
    replica, and for every replica `compute_s`, `exposed_s` and more.

  Raises:
    TypeError: If the config is no `RunConfig`.
    ValueError: If config and cluster do not fit.
  """
  kinds.check_config(config)
  setup = set_up(config, cluster, Options(step_s=step_s))
  return run_time(setup.link_costs, setup.work, setup.script.ops(setup.plan))
