"""Trains runs, reads runs back, and estimates what runs would cost."""

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
from dilocox_jax.api.progress import bar_console, shown_progress
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
from dilocox_jax.distributed.partition_rules import PartitionRule
from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.metrics.run_logs import as_log
from dilocox_jax.metrics.work_directory import CONFIG
from dilocox_jax.models import adapters, families, weights
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
from dilocox_jax.training.watching import FinishedRound, Watching
from dilocox_jax.trees import Tree


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that was trained, read from its directory.

  Attributes:
    workdir: The run directory.
    overrides: What `train` used in place of what the config names. `load`
      returns a run whose overrides are those that it was given.
  """

  workdir: pathlib.Path
  overrides: Overrides = NO_OVERRIDES

  def __repr__(self) -> str:
    """Returns one line: what was trained, or the path if it is unreadable."""
    try:
      return f"Run({self.metrics.summary})"
    except (OSError, ValueError, RecordError):
      return f"Run({self.workdir})"

  def _repr_html_(self) -> str:
    """Returns the outcome as an HTML table, which a notebook shows."""
    return self.metrics._repr_html_()

  @functools.cached_property
  def metrics(self) -> LoadedRun:
    """The recorded losses, bytes and times.

    `.rounds` and `.evaluations` are rows, and `.summary` is one line.

    Raises:
      ValueError: One line, if the directory holds no run, or a file of the run
        is damaged.
    """
    return report.load_run(self.workdir)

  @functools.cached_property
  def config(self) -> RunConfig:
    """Config of the run, read from config.json.

    Raises:
      ValueError: One line, if config.json is damaged.
    """
    with in_front(f"{self.workdir / CONFIG} is not a run's config: "):
      return from_saved(self.metrics.config)

  @property
  def loss(self) -> float:
    """Last validation loss (nats a token); NaN before the first validation.

    It is the loss of the outer parameters, or of their average if the run keeps
    one.
    """
    return self.metrics.validation_loss

  @property
  def sent_bytes(self) -> int:
    """Bytes that one replica has sent during the run."""
    return self.metrics.total_sent_bytes

  @functools.cached_property
  def params(self) -> Tree:
    """Outer parameters of the newest checkpoint, without a replica axis.

    If only a part of the model was trained, they are the trained part.

    Raises:
      RefusedError: If there is no checkpoint, or if `overrides` lacks an object
        that was passed to the run.
    """
    self._check_overrides()
    return start.saved_outer_params(self.workdir, self._whole_overrides)

  def _check_overrides(self) -> None:
    """Raises RefusedError if `overrides` lacks an object that the run had."""
    resume.check_same_overrides(self.metrics.record, self._whole_overrides)

  @functools.cached_property
  def _whole_overrides(self) -> Overrides:
    """The overrides together with the frozen parameters.

    The frozen parameters may be large, so they are read at their first use.
    """
    return start.with_trainable(self.config, self.overrides)

  def export(
    self,
    folder: str | os.PathLike,
    max_file_bytes: int = weights.MAX_FILE_BYTES,
  ) -> str:
    """Writes the trained parameters as a checkpoint that other libraries read.

    A run with `Lora` writes its adapters for `peft`. Any other run writes the
    whole model for `transformers`. If the whole model was trained, the outer
    parameters are read and written one after the other, so the host never has a
    copy of the whole model.

    Args:
      folder: Folder to write into. It is created if it is missing.
      max_file_bytes: Largest number of bytes of tensors in a file. A larger
        model is divided among several files, with an index. Adapters are always
        in one file.

    Returns:
      Name of the family of checkpoints, one of `models.families.FAMILIES`.

    Raises:
      ValueError: One line, if no family has a model like this one, if the model
        was passed in, or if the folder holds another checkpoint.
      RefusedError: If the run has no checkpoint.
    """
    require(
      "model" not in self.metrics.record.get("overrides", ()),
      "a model that is passed in has no form that other libraries read: write "
      "`run.params` or `run.model` by yourself",
    )
    path = pathlib.Path(folder)
    shape = self.config.model.shape
    # This check comes first: it is fast, and reading the parameters is slow.
    family = families.family_of(shape)
    path.mkdir(parents=True, exist_ok=True)
    if self.config.lora.rank:
      base = self.config.checkpoint.init_from
      adapters.export(self.config.lora, path, shape, self.params, base)
    else:
      weights.write_checkpoint(
        path, shape, self._leaves_to_export(), max_file_bytes
      )
    return family

  def _leaves_to_export(self) -> Tree:
    """The parameters of the whole model; if possible, leaves to be read.

    Raises:
      RefusedError: As for `params`.
    """
    if self._whole_overrides.trainable:
      return self.model
    self._check_overrides()
    return start.saved_leaves(self.workdir, self._whole_overrides)

  @property
  def model(self) -> Any:
    """The trained model.

    If a model was passed in, this is its module with the trained parameters.
    Otherwise it is the whole model's parameters as a nested dict. Adapters are
    added to the kernels in both cases.

    Raises:
      RefusedError: As for `params`.
    """
    params = self.params
    adaptation = self._whole_overrides.trainable
    if adaptation:
      whole_params = adaptation.fold(params, adaptation.frozen)
      params = jax.device_put(whole_params)
    if self.overrides.model is None:
      return params
    return self.overrides.model.module(params)


def train(
  model: Any = None,
  data: Any = None,
  *,
  method: str | None = None,
  replicas: int | None = None,
  steps: int | None = None,
  config: RunConfig | Mapping[str, Any] | None = None,
  workdir: str | os.PathLike = "runs/train",
  loss: Callable[..., Any] | None = None,
  partition: PartitionRule | None = None,
  trainable: Lora | Callable[[str], bool] | None = None,
  inner_optimizer: optax.GradientTransformation | None = None,
  outer_optimizer: optax.GradientTransformation | None = None,
  exchange: Aggregator | None = None,
  cluster: str | None = None,
  step_s: float | None = None,
  mailbox: MailboxAddress | None = None,
  check_memory: bool = True,
  log: Any = None,
  on_round: Callable[[FinishedRound], None] | None = None,
  quiet: bool = False,
) -> Run:
  """Trains a run to its end, or continues the run in the directory.

  The config describes the run. The arguments `model`, `data`, `loss`,
  `trainable`, `inner_optimizer`, `outer_optimizer` and `exchange` override what
  the config names, and `run.json` lists the overrides.

  Args:
    model: Model to train: a module of NNX, linen or Equinox, a function from
      `nnx.Rngs` to a module, or a pair of functions (`models.custom`). The
      bytes that the plan counts are then those of its parameters.
    data: (train, validation), a function (replica, step) -> batch, or an
      iterable of batches (`data.feeds`). If rows have named columns, as data
      sets of Hugging Face do, the column `input_ids` is read as tokens, unless
      `loss` is given.
    method: Name of the method; None uses the method of the config.
    replicas: Number of replicas, M; None uses the number in the config.
    steps: Number of inner steps; None uses the number in the config.
    config: Sections of a config, e.g. {"inner": {"learning_rate": 1e-3}}, or a
      whole `RunConfig`. A whole config already has a method, a number of
      replicas and a number of steps, so these arguments must then be None.
    workdir: The run directory. It is created if it is missing.
    loss: Function (model, batch) -> scalar, which calls the model as the module
      is called. If it has a third argument `key`, it gets a key of JAX for each
      micro-batch, e.g. for dropout, and None in evaluations
      (`models.random_loss`). None instead of a function means that batches are
      tokens, and each token is predicted from the tokens before it.
    partition: Function (path, shape) -> `jax.sharding.PartitionSpec` of a
      parameter over the mesh axes "data" and "tensor", for a model that is
      passed in and trained on several devices a replica
      (`mesh.num_data_shards`, `mesh.num_tensor_shards`). If it returns None, or
      is None and the module has no partitioning metadata of flax, the data
      shards divide the parameter's largest dimension.
    trainable: The part of the model that is trained; None trains all of it. It
      is a `dilocox_jax.Lora`, or a function from the path of a leaf to whether
      the leaf is trained. The rest of the model is frozen, as it is in
      `checkpoint.init_from` or in a new model (`models.adapters`).
    inner_optimizer: Optimizer of the replicas, with its own learning rate.
    outer_optimizer: Optimizer of the outer parameters.
    exchange: Averages one fragment over the replicas. The bytes that the run
      reports are still those of the config's codec.
    cluster: Cluster on which the run is timed (simulated): the name of a preset
      or the path of a file.
    step_s: Duration of an inner step on the cluster (seconds); None derives it
      from the config's model.
    mailbox: Mailbox through which this program, which has one replica of the
      run, exchanges with the programs of the other replicas. None trains all
      replicas in this program.
    check_memory: Whether to refuse a run that needs more memory than the host
      or the device has (`api.memory_check`). The need is partly an estimate.
    log: Gets every row that the run writes, as a mapping: a function of a row,
      an object with a method `write(row)` (`dilocox_jax.RunLog`), or names of
      logs, such as "tensorboard" or "tensorboard+wandb(project=links)".
    on_round: Function that is called with a `dilocox_jax.FinishedRound` after
      each round, in every process. It may read the state of all replicas, and
      the devices wait while it does. An error in it ends the run.
    quiet: Whether to show nothing. By default the run logs what it trains, and
      shows how far it is: as a bar in a terminal and in a notebook that has
      ipywidgets, and as lines elsewhere (`api.progress`).

  Returns:
    The run. It reads `metrics` and `model` from the directory at first use.

  Raises:
    TypeError: If an argument has a wrong type.
    ValueError: If an argument or the config is wrong, the directory holds
      another run, or the run needs more memory than there is.
    BusyError: If another run is at work in the directory.
    TrainingStoppedError: If a loss or a parameter is not finite.
  """
  check_kind(
    isinstance(mailbox, MailboxAddress | None),
    "mailbox",
    mailbox,
    "a dilocox_jax.MailboxAddress",
  )
  fields = {
    "sync.method": method,
    "mesh.num_replicas": replicas,
    "total_steps": steps,
  }
  if isinstance(trainable, Lora):
    require(trainable.rank > 0, "trainable: a Lora needs a rank of at least 1")
    fields |= flat({"lora": vars(trainable)})
    trainable = None  # The section `lora` of the config describes it now.
  if mailbox and isinstance(config, Mapping | None):
    fields["exchange.collective"] = MAILBOX
  has_layers = model is None and trainable is None
  run_config = _run_config(config, fields, has_layers)
  overrides = _overrides(
    run_config,
    model=model,
    loss=loss,
    partition=partition,
    data=data,
    inner_optimizer=inner_optimizer,
    outer_optimizer=outer_optimizer,
    exchange=exchange,
  )
  if check_memory:
    refuse_too_large(run_config, overrides)
  overrides = start.with_trainable(run_config, overrides, trainable)
  check_kind(
    on_round is None or callable(on_round),
    "on_round",
    on_round,
    "a function of a dilocox_jax.FinishedRound",
  )
  run_log = None if log is None else as_log(log)
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
    clock = ClusterClock(run_config, cluster, Options(step_s=step_s))
  path = pathlib.Path(workdir)
  progress = contextlib.nullcontext() if quiet else shown_progress()
  console = None if quiet else bar_console()
  with progress:
    trainer = Trainer(
      run_config,
      path,
      "dilocox_jax.train",
      clock,
      overrides,
      address=mailbox,
      watching=Watching(log=run_log, on_round=on_round, console=console),
    )
    trainer.run()
  return Run(path, trainer.overrides)


def _run_config(
  config: RunConfig | Mapping[str, Any] | None,
  fields: Mapping[str, Any],
  has_layers: bool,
) -> RunConfig:
  """Returns the config of a run from the arguments of `train`.

  Args:
    config: The argument `config`.
    fields: Values of the other arguments that are fields of the config, by
      dotted name. None means that the argument was not given.
    has_layers: Whether the trained parameters are those of a model of this
      package, whose layers can be fragments.

  Raises:
    TypeError: If `config` is a whole config and `fields` has a value, or if
      `config` is neither a config nor a mapping.
    ValueError: One line, if a field is unknown or wrong.
  """
  fields = {path: value for path, value in fields.items() if value is not None}
  if not isinstance(config, Mapping | None):
    check_config(config)
    if not fields:
      return config
    raise TypeError(
      f"config has a value for {', '.join(fields)} already: say it there, or "
      "pass the config's sections as a mapping"
    )
  values = dict(flat(config or {})) | fields
  method = values.get("sync.method", "")
  if not has_layers and takes(method, "fragment_order"):
    # Fragments of any tree can be slices of its leaves.
    values.setdefault("sync.fragment_order", SLICED[0])
  return from_mapping(values)


def _overrides(
  config: RunConfig,
  *,
  model: Any,
  loss: Any,
  partition: Any,
  data: Any,
  inner_optimizer: Any,
  outer_optimizer: Any,
  exchange: Any,
) -> Overrides:
  """Returns the overrides among the arguments of `train` or `load`.

  Args:
    config: Config of the run.
    model: As in `train`, and likewise the other arguments.
    loss: As in `train`.
    partition: As in `train`.
    data: As in `train`.
    inner_optimizer: As in `train`.
    outer_optimizer: As in `train`.
    exchange: As in `train`.

  Raises:
    TypeError: If an argument has a wrong type.
    ValueError: One line, if an argument has a wrong value.
  """
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
  check_kind(
    loss is None or callable(loss),
    "loss",
    loss,
    "a function (model, batch) -> scalar or (model, batch, key) -> scalar",
  )
  require(
    model is not None or partition is None,
    "partition: it needs a model that is passed in: the models of the config "
    "have a rule of their own",
  )
  check_kind(
    partition is None or callable(partition),
    "partition",
    partition,
    "a function (path, shape) -> jax.sharding.PartitionSpec",
  )
  feed = None
  if data is not None:
    feed = as_feed(data, reads_tokens(model, loss), config.data.batch_size)

  def example_batch() -> Tree:
    if isinstance(feed, Corpus | None):
      sizes = config.data.batch_size, config.data.sequence_length + 1
      return np.zeros(sizes, np.int32)
    return feed.example()

  if model is not None:
    model = as_loss_model(model, loss, example_batch, partition)
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
  loss: Callable[..., Any] | None = None,
  data: Any = None,
  trainable: Callable[[str], bool] | None = None,
  inner_optimizer: optax.GradientTransformation | None = None,
  outer_optimizer: optax.GradientTransformation | None = None,
  exchange: Aggregator | None = None,
) -> Run:
  """Reads a run from its directory.

  `Run.metrics` and `Run.config` need the directory alone. `Run.params` and
  `Run.model` also need the overrides that were passed to `train`.

  Args:
    workdir: The run directory.
    model: Model that was passed to `train`, if one was.
    loss: Loss that was passed to `train`.
    data: Data like those that were passed to `train`. Only a module of linen
      with a loss needs them, for the shapes of a batch.
    trainable: Function that was passed to `train` and says what was trained.
      The adapters of a `Lora` are in the config, and need no argument.
    inner_optimizer: Inner optimizer that was passed to `train`.
    outer_optimizer: Outer optimizer that was passed to `train`.
    exchange: Exchange that was passed to `train`.

  Returns:
    The run. It reads its parameters at first use.

  Raises:
    ValueError: One line, if the directory holds no run, or a file of the run is
      damaged.
    TypeError: If an argument has a wrong type.
  """
  run = Run(pathlib.Path(workdir))
  _ = run.metrics  # Reports a wrong directory here, not at first use.
  overrides = _overrides(
    run.config,
    model=model,
    loss=loss,
    partition=None,
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
  """Estimates how long a run would take on a cluster, without training.

  The times are computed by formula (`simulate.analytic`).

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
    ValueError: One line, if the cluster is unknown, or if the run does not fit
      on it.
  """
  check_config(config)
  run_cluster = cluster_of(config, cluster)
  setup = set_up(config, run_cluster, Options(step_s=step_s))
  return simulate_run(
    link_costs=setup.link_costs,
    work=setup.work,
    script=setup.script,
    plan=setup.plan,
  )
