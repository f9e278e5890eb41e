"""Runs from Python: train one, read one back, say what one would cost."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from dilocox_jax import report
from dilocox_jax.aggregator import Aggregator
from dilocox_jax.api.memory_check import check_memory as refuse_too_large
from dilocox_jax.api.progress import shown_progress
from dilocox_jax.api.simulation_setup import (
  ClusterClock,
  Options,
  cluster_of,
  set_up,
)
from dilocox_jax.api.step_methods import (
  check_exchange,
  check_kind,
  check_optimizer,
)
from dilocox_jax.checks import flat, in_front, require
from dilocox_jax.config import RunConfig
from dilocox_jax.config.run import check_config, from_mapping, from_saved
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.feeds import as_feed
from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.metrics.work_directory import CONFIG
from dilocox_jax.models import adapters, weights
from dilocox_jax.models.custom import as_loss_model, reads_tokens
from dilocox_jax.plan.collectives import MAILBOX
from dilocox_jax.plan.model.adapters import Lora
from dilocox_jax.plan.schedule.fragments import SLICED
from dilocox_jax.plan.schedule.methods import takes
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.simulate.analytic import Outcome
from dilocox_jax.simulate.long_runs import simulate_run
from dilocox_jax.training import resume, start
from dilocox_jax.training.mailbox_replica import MailboxAddress
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.training.trainer import Trainer
from dilocox_jax.trees import Tree


@dataclasses.dataclass(frozen=True)
class Run:
  """A run directory, read back.

  Attributes:
    workdir: The run directory.
    overrides: Parts that were passed in to the run; without the data.
  """

  workdir: pathlib.Path
  overrides: Overrides = NO_OVERRIDES

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
    """Config of the run.

    Raises:
      ValueError: One line, if config.json is damaged.
    """
    with in_front(f"{self.workdir / CONFIG} is not a run's config: "):
      return from_saved(self.metrics.config)

  @property
  def loss(self) -> float:
    """Last validation loss of the outer parameters (nats a token)."""
    return self.metrics.validation_loss

  @property
  def sent_bytes(self) -> int:
    """Bytes that one replica sent."""
    return self.metrics.total_sent_bytes

  @functools.cached_property
  def params(self) -> Tree:
    """Outer parameters of the newest checkpoint, without a replica axis.

    Raises:
      RefusedError: If there is no checkpoint, or a part that was passed in to
        the run is missing here.
    """
    resume.check_same_overrides(self.metrics.record, self._whole_overrides)
    return start.saved_outer_params(self.workdir, self._whole_overrides)

  @functools.cached_property
  def _whole_overrides(self) -> Overrides:
    """The overrides with the frozen parameters, which are read when needed."""
    return start.with_trainable(self.config, self.overrides)

  def export(self, folder: str | os.PathLike) -> str:
    """Writes what was trained in the form of other libraries.

    The adapters of `Lora` as `peft` reads them, or a whole checkpoint.

    Args:
      folder: Folder, which is made if it is missing.

    Returns:
      Name of the family of checkpoints.

    Raises:
      ValueError: If no such library has the model.
    """
    require(
      "model" not in self.metrics.record.get("overrides", ()),
      "a model that is passed in has no form that other libraries read: write "
      "`run.params` or `run.model` by yourself",
    )
    path, shape = pathlib.Path(folder), self.config.model.shape
    family = weights.family_of(shape)  # First, as it takes no time.
    path.mkdir(parents=True, exist_ok=True)
    if self.config.lora.rank:
      source = self.config.checkpoint.init_from
      adapters.export(self.config.lora, path, shape, self.params, source)
    else:
      weights.write_checkpoint(path, shape, self.model)
    return family

  @property
  def model(self) -> Any:
    """The module that was passed in, with these parameters, or else they."""
    given, params = self.overrides.model, self.params
    if part := self._whole_overrides.trainable:
      params = jax.device_put(part.fold(params, part.frozen))
    return given.module(params) if given else params


def train(
  model: Any = None,
  data: Any = None,
  *,
  method: str | None = None,
  replicas: int | None = None,
  steps: int | None = None,
  config: RunConfig | Mapping[str, Any] | None = None,
  workdir: str | os.PathLike = "runs/train",
  loss: Callable[[Any, Any], Any] | None = None,
  trainable: Lora | Callable[[str], bool] | None = None,
  inner_optimizer: optax.GradientTransformation | None = None,
  outer_optimizer: optax.GradientTransformation | None = None,
  exchange: Aggregator | None = None,
  cluster: str | None = None,
  step_s: float | None = None,
  mailbox: MailboxAddress | None = None,
  check_memory: bool = True,
  quiet: bool = False,
) -> Run:
  """Trains a run to its end, or continues the one in the directory.

  What is passed in takes the place of what the config names, and `run.json`
  says which overrides those are.

  Args:
    model: Model to train: a module of NNX, linen or Equinox, a function from
      `nnx.Rngs` to a module, or a pair of functions (`models.custom`). The
      plan's bytes are then those of its parameters.
    data: (train, validation), a function (replica, step) -> batch, or an
      iterable of batches (`data.feeds`). Rows with names, as those of Hugging
      Face, are read as tokens by their `input_ids` unless there is a loss.
    method: Name of the method; None: that of the config.
    replicas: M; None: that of the config.
    steps: Inner steps; None: those of the config.
    config: Sections of a config, e.g. {"inner": {"learning_rate": 1e-3}}, or a
      whole one, which says all three of the above.
    workdir: The run directory.
    loss: (model, batch) -> scalar, where the model is called as the module is;
      None: batches are tokens, of which each is predicted from those before.
    trainable: What is trained, if not all: `dilocox_jax.Lora`, or a function
      of the path of a leaf. The rest stays as it is in the checkpoint of
      `checkpoint.init_from`, or in a new model (`models.adapters`).
    inner_optimizer: Optimizer of the replicas, with its own learning rate.
    outer_optimizer: Optimizer of the outer parameters.
    exchange: Averages one fragment over the replicas. The bytes that the run
      reports are still those of the config's codec.
    cluster: Cluster, preset or file, on which the run is timed (simulated).
    step_s: Duration of an inner step there (seconds); None derives it from the
      config's model.
    mailbox: Where this program's replica meets the others of the run, which are
      programs of their own; None trains all replicas here.
    check_memory: Whether a run is refused that needs more memory than the host
      or the device has (`api.memory_check`); the need is partly an estimate.
    quiet: Whether the run says nothing. Else it logs what it trains, and now
      and then its loss, its speed and the time that is left (`api.progress`).

  Returns:
    The run, whose `metrics` and `model` are read when they are first used.

  Raises:
    TypeError: If an argument is of another kind than the one that is meant.
    ValueError: If a part cannot be built, the directory holds another run, or
      the run needs more memory than there is.
    BusyError: If another run is at work in the directory.
    TrainingStoppedError: If a value is not finite.
  """
  check_kind(
    isinstance(mailbox, MailboxAddress | None),
    "mailbox",
    mailbox,
    "a dilocox_jax.MailboxAddress",
  )
  said = {
    "sync.method": method,
    "mesh.num_replicas": replicas,
    "total_steps": steps,
  }
  if isinstance(trainable, Lora):
    require(trainable.rank > 0, "trainable: a Lora needs a rank of at least 1")
    said |= flat({"lora": vars(trainable)})
    trainable = None  # The config says it now.
  if mailbox and isinstance(config, Mapping | None):
    said["exchange.collective"] = MAILBOX
  has_layers = model is None and trainable is None
  whole = _config(config, said, has_layers)
  overrides = _overrides(
    whole,
    model=model,
    loss=loss,
    data=data,
    inner_optimizer=inner_optimizer,
    outer_optimizer=outer_optimizer,
    exchange=exchange,
  )
  if check_memory:
    refuse_too_large(whole, overrides)
  overrides = start.with_trainable(whole, overrides, trainable)
  require(
    step_s is None or cluster is not None,
    f"step_s={step_s} is of a cluster on which the run is timed: give cluster",
  )
  clock = None
  if cluster is not None:
    require(
      overrides.model is None or step_s is not None,
      "cluster: the operations of a model that is passed in are not known: "
      "give step_s",
    )
    clock = ClusterClock(whole, cluster, Options(step_s=step_s))
  path = pathlib.Path(workdir)
  progress = contextlib.nullcontext() if quiet else shown_progress()
  with progress:
    trainer = Trainer(
      whole, path, "dilocox_jax.train", clock, overrides, address=mailbox
    )
    trainer.run()
  return Run(path, trainer.overrides)


def _config(
  given: RunConfig | Mapping[str, Any] | None,
  said: Mapping[str, Any],
  has_layers: bool,
) -> RunConfig:
  """Joins a config's sections with what `train` says by itself."""
  said = {path: value for path, value in said.items() if value is not None}
  if not isinstance(given, Mapping | None):
    check_config(given)
    if not said:
      return given
    raise TypeError(
      f"config has a value for {', '.join(said)} already: say it there, or "
      "pass the config's sections as a mapping"
    )
  values = dict(flat(given or {})) | said
  if not has_layers and takes(values.get("sync.method", ""), "fragment_order"):
    values.setdefault("sync.fragment_order", SLICED[0])  # All are cut alike.
  return from_mapping(values)


def _overrides(
  config: RunConfig,
  *,
  model: Any,
  loss: Any,
  data: Any,
  inner_optimizer: Any,
  outer_optimizer: Any,
  exchange: Any,
) -> Overrides:
  """Returns what was passed in, once each part is of its kind."""
  optimizers = {
    "inner_optimizer": inner_optimizer,
    "outer_optimizer": outer_optimizer,
  }
  for name, optimizer in optimizers.items():
    if optimizer is not None:
      check_optimizer(name, optimizer)
  if exchange is not None:
    check_exchange(exchange)
  require(
    model is not None or loss is None,
    "loss: it needs a model that is passed in",
  )
  is_function = loss is None or callable(loss)
  check_kind(is_function, "loss", loss, "a function (model, batch) -> scalar")
  feed = None
  if data is not None:
    has_tokens = reads_tokens(model, loss)
    feed = as_feed(data, has_tokens, config.data.batch_size)

  def example() -> Tree:
    if isinstance(feed, Corpus | None):
      sizes = config.data.batch_size, config.data.sequence_length + 1
      return np.zeros(sizes, np.int32)
    return feed.example()

  if model is not None:
    model = as_loss_model(model, loss, example)
  return Overrides(
    model=model,
    data=feed,
    inner_optimizer=inner_optimizer,
    outer_optimizer=outer_optimizer,
    exchange=exchange,
  )


def load(
  workdir: str | os.PathLike,
  *,
  model: Any = None,
  loss: Callable[[Any, Any], Any] | None = None,
  data: Any = None,
  trainable: Callable[[str], bool] | None = None,
  inner_optimizer: optax.GradientTransformation | None = None,
  outer_optimizer: optax.GradientTransformation | None = None,
  exchange: Aggregator | None = None,
) -> Run:
  """Reads a run directory: `.config`, `.metrics` and `.params`.

  Args:
    workdir: The run directory.
    model: Model that was passed in, if one was; only `.params` needs it, and
      likewise the overrides below.
    loss: Loss that was passed in.
    data: Data of the same kind; only a module of linen with a loss needs them.
    trainable: Function that was passed in and says what was trained; the
      config says it of adapters.
    inner_optimizer: Inner optimizer that was passed in.
    outer_optimizer: Outer optimizer that was passed in.
    exchange: Exchange that was passed in.

  Raises:
    ValueError: One line, if the directory holds no run, or a file of it is
      damaged.
    TypeError: If a part is of another kind than the one that is meant.
  """
  run = Run(pathlib.Path(workdir))
  _ = run.metrics  # A wrong directory is reported here and not at first use.
  overrides = _overrides(
    run.config,
    model=model,
    loss=loss,
    data=data,
    inner_optimizer=inner_optimizer,
    outer_optimizer=outer_optimizer,
    exchange=exchange,
  )
  run = dataclasses.replace(run, overrides=overrides)
  if trainable is None:
    return run
  overrides = start.with_trainable(run.config, overrides, trainable)
  return dataclasses.replace(run, overrides=overrides)


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
    Simulated times: `total_s`, `utilization` (0 to 1), `sent_bytes` of one
    replica, and for every replica `compute_s`, `exposed_s` and more.

  Raises:
    TypeError: If the config is no `RunConfig`.
    ValueError: If config and cluster do not fit.
  """
  check_config(config)
  placed = cluster_of(config, cluster)
  setup = set_up(config, placed, Options(step_s=step_s))
  return simulate_run(
    link_costs=setup.link_costs,
    work=setup.work,
    script=setup.script,
    plan=setup.plan,
  )
