"""Builds the programs of a run, e.g. rounds and outer steps, from its config.

The code of the inner step, the exchange and the outer step takes plain
arguments and does not know the config. This module reads the config and
connects them. `model_functions` does the same for the model, and `run_text` for
the data.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.aggregators.exchange import exchange as mean_exchange
from dilocox_jax.aggregators.exchange import mean_of_finite_replicas
from dilocox_jax.aggregators.norm_filter import norm_filter
from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.checks import require
from dilocox_jax.codecs.base import Codec
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.config.device_memory import chosen_gather
from dilocox_jax.config.platforms import on_platform
from dilocox_jax.config.sections import InnerConfig, MembershipConfig
from dilocox_jax.distributed import coordinator_store, host_memory
from dilocox_jax.distributed.free_memory import device_bytes
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.inner.step import inner_step
from dilocox_jax.models.loss import LossModel
from dilocox_jax.optimizers import (
  inner_optimizer,
  learning_rate_schedule,
  named_optimizer,
  outer_rate_schedule,
)
from dilocox_jax.outer.average import averaged, schedule_free
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.adaptive import Policy
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.rounds.data_parallel import StepPrograms
from dilocox_jax.rounds.exchanges import LocalExchange, MailboxExchange
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.training.mailbox_replica import mailbox_exchange
from dilocox_jax.training.model_functions import model_functions, run_division
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.trees import Array, Tree, shapes_by_path


@dataclasses.dataclass(frozen=True)
class Programs:
  """The plan of a run, its model, and its programs for the devices.

  Attributes:
    model: The model, with the loss of evaluations (`model_functions`).
    evaluation: Function (params, batches [N, B, L + 1]) -> mean loss of one
      replica (nats a token). With a loss of the user, batches are trees
      [N, B, ...]. If a part of the model is frozen, this part is one more
      argument, `frozen`.
    schedule: Function from the inner step to the learning rate. It returns NaN
      if the user supplied an inner optimizer, which has its own rate.
    steps: Programs of data-parallel steps of all replicas.
    rounds: Programs of rounds with the codec and H (steps of a round) of the
      config.
    plan: Plan of the run, with the H of the config.
    traffic: Computes the bytes that `steps` and `rounds` send.
    policy: Rule by which the codec's rank, and H, may change during the run.
    aggregator_of: Function from a codec to an aggregator, which encodes the
      replicas' messages with this codec and averages them.
  """

  model: LossModel
  evaluation: Callable[..., Any]
  schedule: optax.Schedule
  steps: StepPrograms
  rounds: Rounds
  plan: RunPlan
  traffic: Traffic
  policy: Policy
  aggregator_of: Callable[[Codec], Aggregator]

  @property
  def parameter_count(self) -> int:
    """Number of trained parameters of one replica."""
    return sum(math.prod(shape) for shape in self.traffic.shapes.values())

  @functools.cached_property
  def evaluate(self) -> Any:
    """The compiled function (params, batches) -> mean loss (nats a token).

    Batches are token ids [N, B, L + 1]: N batches of B sequences. A sequence
    has L + 1 tokens, and each of its last L tokens is predicted. With a loss of
    the user, batches are trees [N, B, ...]. Parameters have no replica axis.
    """
    return self._evaluation_program(params_axis=None, losses_axis=None)

  @functools.cached_property
  def evaluate_each(self) -> Any:
    """The compiled function (params, batches) -> losses [M], one a replica.

    The parameters have leaves [M, ...]. Every replica evaluates its own
    parameters on all batches, which have the form that `evaluate` takes. With a
    mailbox, M is 1.
    """
    return self._evaluation_program(params_axis=0, losses_axis=0)

  def _evaluation_program(
    self, params_axis: int | None, losses_axis: int | None
  ) -> Callable:
    """Returns the compiled function (params, batches) -> losses.

    An axis is 0 for parameters or losses with a replica axis in front, and None
    for those that all replicas share.
    """
    frozen = self.rounds.frozen
    replicas = self.rounds.replicas
    if frozen is None:
      return jax.jit(
        replicas.map(self.evaluation, (params_axis, None), losses_axis)
      )

    # If `frozen` were not an argument, the program would contain these
    # parameters as constants.
    def evaluation(params: Tree, batches: Tree, frozen: Tree) -> Any:
      return self.evaluation(params, batches, frozen=frozen)

    program = jax.jit(
      replicas.map(evaluation, (params_axis, None, None), losses_axis)
    )
    return lambda params, batches: program(params, batches, frozen)


def _aggregator_of(config: RunConfig) -> Callable[[Codec], Aggregator]:
  """Returns a function from a codec to the aggregator that uses it.

  The aggregator averages the replicas' messages as `config.exchange` says.
  """
  exchange = config.exchange
  mean_of = functools.partial(
    mean_exchange,
    feedback=exchange.feedback,
    against=exchange.against,
    keep_unsent=exchange.keep_unsent,
    collective=exchange.collective,
    seed=config.seed,
  )
  ratio = exchange.max_norm_ratio
  if not ratio:
    return mean_of
  return lambda codec: norm_filter(mean_of(codec), ratio)


def run_exchange(
  config: RunConfig, overrides: Overrides = NO_OVERRIDES
) -> LocalExchange | MailboxExchange:
  """Builds the exchange that averages over the replicas of a run.

  If the overrides have an exchange, it is used; otherwise the config says how
  to average. If the config names a mailbox and the overrides have no exchange,
  the result exchanges nothing, and serves only to read what the run has saved.
  """
  if isinstance(overrides.exchange, MailboxExchange):
    return overrides.exchange
  if config.uses_mailbox:
    # Nobody gave a mailbox, so the caller only reads what the run has saved.
    return mailbox_exchange(config)
  aggregator = overrides.exchange
  if aggregator is None:
    aggregator = _aggregator_of(config)(to_plan.codec(config))
  return LocalExchange(aggregator, in_thread=_needs_thread(config))


def programs(
  config: RunConfig,
  overrides: Overrides = NO_OVERRIDES,
  end_of_text: int | None = None,
  platform: str | None = None,
  devices: Sequence[Any] | None = None,
) -> Programs:
  """Builds the model, the optimizers and all programs of a run.

  Args:
    config: Config of the run.
    overrides: Objects in place of those that the config names.
    end_of_text: Token after which attention starts anew; None: attention sees
      the whole sequence.
    platform: Kind of devices that the programs are for, e.g. "tpu". None means
      the kind of `devices`.
    devices: Devices to compile for (`jax.Device`). They need not be attached.
      None: the devices of JAX.

  Raises:
    ValueError: In one of these cases:

      - There are too few devices, or they lack the memory `mesh.outer_memory`.
      - An optimizer of the config is unknown or cannot be built.
      - The model cannot be divided among devices or into fragments.
      - Pipeline stages would have to train only a part of the model.
      - The builder of a preset returns a model with other leaves than the
        preset.
      - Replicas may be absent or slow (`config.membership`), and each replica
        has outer parameters of its own.
      - Replicas may be absent or slow, and an exchange is passed in.
  """
  if devices:
    platform = platform or devices[0].platform
  computation = on_platform(
    config, platform or platform_name(), overrides.model is not None
  )
  inner = config.inner
  mesh = config.mesh
  reason = host_memory.unsupported(
    mesh.outer_memory, devices or jax.local_devices()
  )
  require(
    reason is None,
    f"mesh.outer_memory={mesh.outer_memory!r}: {reason}: take 'device'",
  )
  division = run_division(config, overrides.model)
  model, gradient, evaluation = model_functions(
    config,
    computation,
    division,
    gather=_gather(config, devices),
    supplied=overrides.model,
    end_of_text=end_of_text,
    trainable=overrides.trainable,
  )
  shapes = None  # None means the shapes of the config's model.
  view = FragmentView(config.fragments.num_fragments, config.fragments)
  if overrides.model is not None or overrides.trainable:
    params = jax.eval_shape(model.init, jax.random.key(0))
    view.check(params)
    shapes = shapes_by_path(params)
  schedule = learning_rate_schedule(
    inner.schedule,
    inner.learning_rate,
    warmup_steps=inner.warmup_steps,
    total_steps=config.total_steps,
    final_fraction=inner.final_fraction,
  )
  optimizer = overrides.inner_optimizer
  if optimizer is None:
    optimizer = named_inner_optimizer(config.inner, schedule)
  exchange = run_exchange(config, overrides)
  if devices is not None:
    devices = tuple(devices)
  replicas = Replicas(
    num_replicas=config.num_local_replicas,
    layout=mesh.layout,
    division=division,
    devices=devices,
    axis_name=exchange.axis_name,
  )
  frozen = None
  if overrides.trainable:
    frozen = replicas.place_state(overrides.trainable.frozen, None)
  outer = outer_step(config, overrides, exchange.aggregator)
  _check_membership(config, overrides, outer)
  # A method that sends gradients compresses them. A warm start sends gradients
  # without compression.
  if config.sync.named.exchanged == "gradient":
    gradient_aggregator = outer.aggregator
    step_optimizer = _with_average(optimizer, config.outer.average_power)
  else:
    gradient_aggregator = mean_of_finite_replicas()
    step_optimizer = optimizer
  recorded_schedule = schedule
  if overrides.inner_optimizer is not None:
    # A supplied optimizer has its own learning rate, which nobody can read.
    recorded_schedule = optax.constant_schedule(math.nan)
  return Programs(
    model=model,
    evaluation=evaluation,
    schedule=recorded_schedule,
    steps=StepPrograms(
      gradient=gradient,
      optimizer=step_optimizer,
      aggregator=gradient_aggregator,
      replicas=replicas,
      frozen=frozen,
    ),
    rounds=Rounds(
      outer=outer,
      view=view,
      replicas=replicas,
      inner_step=inner_step(gradient, optimizer),
      outer_memory=mesh.outer_memory,
      make_runtime=exchange.make_runtime,
      frozen=frozen,
    ),
    plan=to_plan.run_plan(config),
    traffic=to_plan.traffic(config, shapes),
    policy=to_plan.policy(config),
    aggregator_of=_aggregator_of(config),
  )


def named_inner_optimizer(
  inner: InnerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
  """Builds the inner optimizer that a config names.

  Args:
    inner: The section of the config that names the optimizer.
    schedule: Function from the inner step to the learning rate. It replaces the
      learning rate and the schedule of `inner`.
  """
  return inner_optimizer(
    inner.optimizer,
    schedule,
    inner.changed_options,
    clip_norm=inner.clip_norm,
    b1=inner.b1,
    b2=inner.b2,
    weight_decay=inner.weight_decay,
    momentum=inner.momentum,
  )


def _check_membership(
  config: RunConfig, overrides: Overrides, outer: OuterStep
) -> None:
  """Raises ValueError if replicas cannot be absent or slow in this run.

  If the config has no absent and no slow replicas, nothing is refused.
  """
  if config.membership == MembershipConfig():
    return
  require(
    outer.is_shared,
    f"sync.rule={outer.method.rule!r} with exchange.collective="
    f"{config.exchange.collective!r} gives each replica outer parameters of "
    "its own, which one that was away cannot take over: drop "
    "membership.absences, absence_rate and inner_steps, or take rule continue "
    "and collective auto",
  )
  require(
    not overrides.exchange,
    "an exchange that is passed in does not go with membership.absences, "
    "absence_rate and inner_steps: name its codec in the config",
  )


def _gather(config: RunConfig, devices: Sequence[Any] | None) -> str:
  """Returns when the data shards of a pipeline stage collect its layers.

  "stage" means all layers of the stage at once, "layer" one after the other.
  All processes return the same value.
  """
  # The free memory decides only if the user leaves the choice open.
  is_open = config.mesh.gather == "auto" and config.mesh.num_stages > 1
  if devices is not None or not is_open:
    return chosen_gather(config)
  # All processes run one program, so the smallest memory decides for all.
  memory_bytes = min(map(device_bytes, jax.local_devices()))
  least_bytes = min(coordinator_store.allgather(memory_bytes))
  return chosen_gather(config, least_bytes)


def _needs_thread(config: RunConfig) -> bool:
  """Whether a second thread dispatches exchanges (`rounds.exchange_thread`)."""
  # XLA overlaps transfers with steps on TPUs and GPUs, but not on CPUs. Inside
  # one process there is no link.
  mesh = config.mesh
  if mesh.exchange_dispatch != "auto":
    return mesh.exchange_dispatch == "thread"
  is_between_cpus = jax.process_count() > 1 and jax.default_backend() == "cpu"
  return is_between_cpus and mesh.outer_memory == host_memory.DEVICE


def _with_average(
  optimizer: optax.GradientTransformation, power: float
) -> optax.GradientTransformation:
  """Lets an optimizer keep a running average of the parameters.

  With a `power` of 0, the optimizer is returned unchanged.
  """
  if not power:
    return optimizer
  return averaged(optimizer, power)


def outer_step(
  config: RunConfig, overrides: Overrides, aggregator: Aggregator
) -> OuterStep:
  """Builds the outer step of a fragment (a part of the parameters).

  The aggregator averages the replicas' pseudo-gradients. The outer optimizer
  applies the mean, by the apply rule of the method. If the overrides have an
  outer optimizer, it takes the place of the one that the config names.
  """
  outer = config.outer
  optimizer = overrides.outer_optimizer
  if optimizer is None:
    optimizer = outer_optimizer(config, outer.learning_rate)
  else:
    optimizer = _with_average(optimizer, outer.average_power)
  return OuterStep(
    method=config.sync.named, optimizer=optimizer, aggregator=aggregator
  )


def outer_optimizer(
  config: RunConfig, learning_rate: float | Array
) -> optax.GradientTransformation:
  """Builds the outer optimizer that a config names.

  With `outer.average_power`, it also keeps an average of the parameters. The
  argument `learning_rate` takes the place of `outer.learning_rate` of the
  config. It may be a traced value.
  """
  outer = config.outer
  rate = learning_rate
  if outer.schedule != "constant":
    rate = outer_rate_schedule(
      outer.schedule,
      learning_rate,
      round_starts=to_plan.run_plan(config).round_starts(),
      final_fraction=outer.final_fraction,
    )
  optimizer = named_optimizer(
    outer.optimizer,
    rate,
    momentum=outer.momentum,
    nesterov=outer.nesterov and bool(outer.momentum),
  )
  if outer.is_schedule_free:
    return schedule_free(optimizer)
  return _with_average(optimizer, outer.average_power)


def platform_name() -> str:
  """Returns the kind of JAX's devices: "cpu", "tpu", "gpu" (NVIDIA) or "rocm".

  JAX itself calls GPUs of NVIDIA and of AMD "gpu".
  """
  name = jax.default_backend()
  if name == "gpu":
    version = jax.local_devices()[0].client.platform_version
    if "rocm" in version:
      return "rocm"
  return name
