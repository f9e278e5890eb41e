"""Trains runs, reads runs back, and estimates how long runs would take."""

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
  """A run, finished or not, read from its directory.

  Attributes:
    workdir: The run directory.
    overrides: Objects that were passed to `train` or `load` in place of parts
      that the config names, e.g. a model or an optimizer.
  """

  workdir: pathlib.Path
  overrides: Overrides = NO_OVERRIDES

  def __repr__(self) -> str:
    """Returns a one-line summary; the path if the run cannot be read."""
    try:
      return f"Run({self.metrics.summary})"
    except (OSError, ValueError, RecordError):
      return f"Run({self.workdir})"

  def _repr_html_(self) -> str:
    """Returns the metrics as an HTML table, which a notebook shows."""
    return self.metrics._repr_html_()

  @functools.cached_property
  def metrics(self) -> LoadedRun:
    """The losses, bytes and times that the run has recorded.

    `.rounds` and `.evaluations` are lists of rows, `.summary` is a line of
    text.

    Raises:
      ValueError: One line, if the directory holds no run, or a damaged file.
    """
    return report.load_run(self.workdir)

  @functools.cached_property
  def config(self) -> RunConfig:
    """Config of the run, read from config.json.

    Raises:
      ValueError: If config.json is damaged. The message is one line.
    """
    with in_front(f"{self.workdir / CONFIG} is not a run's config: "):
      return from_saved(self.metrics.config)

  @property
  def loss(self) -> float:
    """Last validation loss (nats a token); NaN before the first validation.

    It is that of the outer parameters, or of their average if the run keeps one
    (`outer.average_power`).
    """
    return self.metrics.validation_loss

  @property
  def sent_bytes(self) -> int:
    """Bytes that one replica has sent during the run."""
    return self.metrics.total_sent_bytes

  @functools.cached_property
  def params(self) -> Tree:
    """Outer parameters of the newest checkpoint, without a replica axis.

    If the run keeps an average of the outer parameters (`outer.average_power`),
    this average takes their place. If only a part of the model was trained,
    they are that part.

    Raises:
      RefusedError: If there is no checkpoint, or if an object such as the
        model was passed to only one of `train` and `load`.
    """
    self._check_overrides()
    return start.saved_outer_params(self.workdir, self._whole_overrides)

  def _check_overrides(self) -> None:
    """Raises RefusedError if `overrides` lacks an object passed to `train`."""
    resume.check_same_overrides(self.metrics.record, self._whole_overrides)

  @functools.cached_property
  def _whole_overrides(self) -> Overrides:
    """The overrides, with the frozen parameters if a part was not trained."""
    return start.with_trainable(self.config, self.overrides)

  def export(
    self,
    folder: str | os.PathLike,
    max_file_bytes: int = weights.MAX_FILE_BYTES,
  ) -> str:
    """Writes the trained parameters as a checkpoint that other libraries read.

    A run with `Lora` writes its adapters for `peft`. Any other run writes the
    whole model for `transformers`.

    Args:
      folder: Folder to write into. It is created if it is missing.
      max_file_bytes: Largest number of bytes of tensors in a file. A larger
        model is divided among several files; adapters never are.

    Returns:
      Name of the family of checkpoints, one of `models.families.FAMILIES`.

    Raises:
      ValueError: One line, if no family has a model like this one, if the user
        passed the model to `train`, or if the folder holds another checkpoint.
      RefusedError: If the run has no checkpoint, or if an object such as the
        model was passed to only one of `train` and `load`.
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
    """Returns the parameters of the whole model for `export` to write.

    If all of them were trained, each is read only when it is written.
    """
    if self._whole_overrides.trainable:
      return self.model
    self._check_overrides()
    return start.saved_leaves(self.workdir, self._whole_overrides)

  @property
  def model(self) -> Any:
    """The trained model; LoRA adapters, if any, are added to its kernels.

    The result depends on the model that was passed to `train`:

    - A module, or a function that makes one: the module with the trained
      parameters.
    - A pair (init, apply), together with a `loss`: `apply` with the trained
      parameters bound.
    - Anything else, or no model: the tree of the whole model's parameters.

    Raises:
      RefusedError: If there is no checkpoint, or if an object such as the
        model was passed to only one of `train` and `load`.
    """
    params = self.params
    adaptation = self._whole_overrides.trainable
    if adaptation:
      # Parameters that were not trained may be arrays of numpy. They are put on
      # a device, too.
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
  """Trains a run to its end, or continues the run that is in the directory.

  The config describes the run. The arguments `model`, `data`, `loss`,
  `trainable`, `inner_optimizer`, `outer_optimizer` and `exchange` take the
  place of parts that the config names.

  Args:
    model: Model to train: a module of NNX, linen or Equinox, a function from
      `nnx.Rngs` to a module, or a pair of functions: (init, loss), or (init,
      apply) if `loss` is given (`models.custom.as_loss_model`). None trains the
      model of the config.
    data: Data to train on: a pair (train, validation) of arrays or data sets, a
      function (replica, step) -> batch, or an iterable of batches
      (`data.feeds.as_feed` lists all kinds). A model that is trained on tokens
      reads them from the column `input_ids` if columns have names. None reads
      the data that the config names.
    method: Name of the method, e.g. "overlap_loco"; None uses the config's.
    replicas: Number of replicas, M; None uses the number in the config.
    steps: Number of inner steps of each replica; None uses the config's.
    config: Sections of a config, e.g. {"inner": {"learning_rate": 1e-3}}, or a
      whole `RunConfig`. With a `RunConfig`, `method`, `replicas` and `steps`
      must be None, and `trainable` must not be a `Lora`.
    workdir: The run directory. It is created if it is missing.
    loss: Function (model, batch) -> scalar for a `model` that is passed in.
      With a third argument `key`, it gets a random key of JAX for each
      micro-batch, and None in evaluations. A pair (init, loss) has its own
      loss, so leave `loss` out. If `loss` is None, any other model gets batches
      of token ids, and the loss is the mean negative log-likelihood of each
      next token.
    partition: Function (path, shape) -> `jax.sharding.PartitionSpec`, for a
      `model` that is passed in. It says how the mesh axes "data" and "tensor"
      divide a parameter. If it returns None, data shards divide the largest
      suitable dimension of a large parameter. If `partition` is None, the flax
      partitioning metadata of the module are used, if it has any.
    trainable: The part of the model that is trained: a `dilocox_jax.Lora`, or a
      function from the path of a leaf to whether it is trained. The rest keeps
      its first values: those of the checkpoint `checkpoint.init_from`, or of a
      new model. None trains the whole model.
    inner_optimizer: Optimizer of the inner steps, with its own learning rate;
      None uses the optimizer of the config.
    outer_optimizer: Optimizer of the outer parameters; None uses the optimizer
      of the config.
    exchange: Aggregator that averages over the replicas; None uses the codec
      and the collective of the config. The run reports bytes of the config's
      codec in either case.
    cluster: Cluster on which the run is timed (simulated): the name of a preset
      or the path of a file. None: no time is simulated.
    step_s: Duration of an inner step on the cluster (seconds), only if
      `cluster` is given. None derives it from the config's model. A run with
      `cluster` and a `model` that is passed in needs a value.
    mailbox: Makes this program train one replica, and exchange messages with
      the programs of the other replicas through this mailbox. None: this
      program trains all replicas.
    check_memory: Whether to refuse a run that needs more than 1.1 times the
      memory of the host or the device (partly estimated, `api.memory_check`).
    log: Receiver of every row that the run writes: a function of a row, an
      object with `write(row)` (`dilocox_jax.RunLog`), or names such as
      "tensorboard" or "tensorboard+wandb(project=links)". None: rows are only
      written to files.
    on_round: Function of a `dilocox_jax.FinishedRound`. Every process calls it
      when a round has been given to the devices. In a phase without rounds, it
      is called when some data-parallel steps have been given to them. The next
      round is given to the devices when the function has returned. An error
      that the function raises ends the run.
    quiet: Whether to show no progress. By default, log lines show it. A bar
      shows it in a terminal, and in a notebook with ipywidgets.

  Returns:
    The run. It reads `metrics` and `model` from the directory at first use.

  Raises:
    TypeError: If an argument has a wrong type.
    ValueError: One line, if an argument or the config is wrong, if the
      directory holds another run, or if the run needs more memory than there
      is.
    BusyError: If another program is using the directory.
    TrainingStoppedError: If a loss, a gradient or a parameter is not finite, if
      the replicas' copies of the outer state differ, or if a replica with a
      mailbox cannot go on.
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
  """Combines the arguments of `train` that describe the config.

  Args:
    config: Sections of a config, or a whole config; None: all defaults.
    fields: Values of other arguments of `train`, by the dotted name of a field;
      None for an argument that was not given.
    has_layers: Whether groups of layers can be fragments. If not, fragments are
      slices of every leaf, unless the config names another order.
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
  """Checks the objects that were passed to `train` or `load`, and wraps them.

  The arguments mean the same as in `train`. None: not given.
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
      # A row has one token more than a sequence, because the last token of a
      # sequence also has a token to predict.
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

  `Run.metrics` and `Run.config` need only the directory. For `Run.params` and
  `Run.model`, pass the same objects again that were passed to `train`.

  Args:
    workdir: The run directory.
    model: Model that was passed to `train`. Here and in the other arguments,
      None says that `train` got no such object.
    loss: Loss function that was passed to `train`.
    data: Data of the same form as those that were passed to `train`. They are
      needed only for a module of linen with a loss function.
    trainable: Function that was passed to `train`. Leave it out if a `Lora` was
      passed: the config of the run contains it.
    inner_optimizer: Inner optimizer that was passed to `train`.
    outer_optimizer: Outer optimizer that was passed to `train`.
    exchange: Aggregator that was passed to `train`.

  Returns:
    The run. It reads its parameters at first use.

  Raises:
    ValueError: One line, if the directory holds no run or a damaged file, or if
      an argument is wrong, e.g. `loss` without `model`.
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
      operations of a step and the speed of the cluster's devices.

  Returns:
    Simulated times (seconds) and bytes, e.g. `total_s` of the run,
    `utilization` (share of it in which replicas compute, 0 to 1) and
    `sent_bytes` of one replica. `compute_s` and `exposed_s` (waiting for links)
    are for each replica.

  Raises:
    TypeError: If `config` is not a `RunConfig`.
    ValueError: One line, if the cluster is unknown or the run does not fit on
      it.
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
