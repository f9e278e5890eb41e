"""Builds every part of a run from its config.

Model, inner step, exchange and outer step take plain arguments and do not know
the config. This file reads it, with `model_functions` for the model and
`run_text` for the data, and joins these parts. The trainer only goes through
the plan.
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
from dilocox_jax.config.platforms import on_platform
from dilocox_jax.config.sections import MembershipConfig
from dilocox_jax.distributed import host_memory
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.inner.step import inner_step
from dilocox_jax.models.loss import LossModel
from dilocox_jax.optimizers import (
  inner_optimizer,
  learning_rate_schedule,
  named_optimizer,
)
from dilocox_jax.outer.average import averaged
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.adaptive import Policy
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.rounds.data_parallel import StepPrograms
from dilocox_jax.rounds.exchanges import LocalExchange, MailboxExchange
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.training.mailbox_replica import mailbox_exchange
from dilocox_jax.training.model_functions import model_functions
from dilocox_jax.training.parts import NO_PARTS, Parts
from dilocox_jax.trees import Tree, shapes_by_path


@dataclasses.dataclass(frozen=True)
class Programs:
  """Holds the plan, the model and all programs that run on the devices.

  Attributes:
    model: Functions of the model; its loss is that of evaluations.
    evaluation: Function (params, batches [N, B, L + 1]) -> mean loss of one
      replica, for use under `Replicas.map`. If anything is frozen, it has an
      argument `frozen` too.
    schedule: Function from the inner step to the learning rate; NaN if an inner
      optimizer was handed in, which has its own.
    steps: Programs of data-parallel steps of all replicas.
    rounds: Programs of the method's first rounds.
    plan: Plan of the run, with the H of the first rounds.
    traffic: Bytes that these rounds send.
    policy: How rank and H change after them.
    aggregator_of: Function from a codec to what averages a fragment with it.
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
    """Number of parameters of one replica."""
    return sum(math.prod(shape) for shape in self.traffic.shapes.values())

  @functools.cached_property
  def evaluate(self) -> Any:
    """The jitted function (params, batches) -> mean loss (nats a token).

    Batches are token ids [N, B, L + 1]: N batches of B sequences. A sequence
    has L + 1 tokens, and each of its last L tokens is predicted. All replicas
    compute the same.
    """
    return self._evaluation_program(None, None)

  @functools.cached_property
  def evaluate_each(self) -> Any:
    """The jitted function (params [M, ...], batches) -> losses [M].

    Every replica evaluates its own parameters, so nothing is sent.
    """
    return self._evaluation_program(0, 0)

  def _evaluation_program(self, of_params: Any, of_losses: Any) -> Callable:
    """Returns the jitted function (params, batches) -> losses.

    Args:
      of_params: Axis of the replicas in the parameters; None: there is none.
      of_losses: Axis of the replicas in the losses.
    """
    frozen = self.rounds.frozen
    replicas = self.rounds.replicas
    if frozen is None:
      evaluation = self.evaluation
      return jax.jit(replicas.map(evaluation, (of_params, None), of_losses))

    def evaluation(params: Tree, batches: Tree, frozen: Tree) -> Any:
      return self.evaluation(params, batches, frozen=frozen)

    program = jax.jit(
      replicas.map(evaluation, (of_params, None, None), of_losses)
    )
    return lambda params, batches: program(params, batches, frozen)


def _aggregator_of(config: RunConfig) -> Callable[[Codec], Aggregator]:
  """Builds the function from a codec to what averages a fragment with it.

  Args:
    config: Config of a run whose replicas share a runtime.
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
  config: RunConfig, parts: Parts = NO_PARTS
) -> LocalExchange | MailboxExchange:
  """Builds what averages over the replicas of a run.

  Args:
    config: Config of the run.
    parts: Parts that take the place of what the config names.
  """
  if isinstance(parts.exchange, MailboxExchange):
    return parts.exchange
  if config.uses_mailbox:  # The run is only read.
    return mailbox_exchange(config)
  aggregator = parts.exchange
  if aggregator is None:
    aggregator = _aggregator_of(config)(to_plan.codec(config))
  return LocalExchange(aggregator, in_thread=_needs_thread(config))


def programs(
  config: RunConfig,
  parts: Parts = NO_PARTS,
  end_of_text: int | None = None,
  platform: str | None = None,
  devices: Sequence[Any] | None = None,
) -> Programs:
  """Builds the model, the optimizers and the programs of all phases.

  Args:
    config: Config of the run.
    parts: Parts that take the place of what the config names.
    end_of_text: Token at which attention begins anew (`RunData`).
    platform: Kind of devices that the programs are for, e.g. "tpu"; None means
      `devices`, or those that JAX has.
    devices: Devices to compile for (`Replicas.devices`).

  Raises:
    ValueError: If there are too few devices, a device lacks the memory kind of
      the config, optax lacks an optimizer of the config, or an exchange is
      handed in, or a rule keeps outer parameters apart, although replicas are
      away.
  """
  if devices:
    platform = platform or devices[0].platform
  computation = on_platform(
    config, platform or platform_name(), parts.model is not None
  )
  inner, mesh = config.inner, config.mesh
  reason = host_memory.unsupported(
    mesh.outer_memory, devices or jax.local_devices()
  )
  require(
    reason is None,
    f"mesh.outer_memory={mesh.outer_memory!r}: {reason}: take 'device'",
  )
  model, gradient, evaluation = model_functions(
    config, computation, parts.model, end_of_text, parts.trainable
  )
  shapes = None  # Those of the config.
  view = FragmentView(config.fragments.num_fragments, config.fragments)
  if parts.model is not None or parts.trainable:
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
  optimizer = parts.inner_optimizer
  if optimizer is None:
    optimizer = inner_optimizer(
      inner.optimizer,
      schedule,
      inner.changed_options,
      clip_norm=inner.clip_norm,
      b1=inner.b1,
      b2=inner.b2,
      weight_decay=inner.weight_decay,
      momentum=inner.momentum,
    )
  exchange = run_exchange(config, parts)
  replicas = Replicas(
    config.num_local_replicas,
    mesh.layout,
    config.division,
    None if devices is None else tuple(devices),
    axis_name=exchange.axis_name,
  )
  part = parts.trainable
  frozen = replicas.place_state(part.frozen, None) if part else None
  outer = outer_step(config, parts, exchange.aggregator)
  power = config.outer.average_power
  is_always_here = config.membership == MembershipConfig()
  require(
    is_always_here or outer.is_shared,
    f"sync.rule={outer.method.rule!r} with exchange.collective="
    f"{config.exchange.collective!r} gives each replica outer parameters of "
    "its own, which one that was away cannot take over: drop "
    "membership.absences, absence_rate and inner_steps, or take rule continue "
    "and collective auto",
  )
  require(
    not parts.exchange or is_always_here,
    "an exchange that is handed in does not go with membership.absences, "
    "absence_rate and inner_steps: name its codec in the config",
  )
  # A method that sends gradients compresses them. A warm start sends gradients
  # without compression.
  sends_gradients = config.sync.named.exchanged == "gradient"
  mean = outer.aggregator if sends_gradients else mean_of_finite_replicas()
  shared = _averaged(optimizer, power) if sends_gradients else optimizer
  recorded = schedule
  if parts.inner_optimizer is not None:  # It has its own rate.
    recorded = optax.constant_schedule(math.nan)
  return Programs(
    model=model,
    evaluation=evaluation,
    schedule=recorded,
    steps=StepPrograms(gradient, shared, mean, replicas, frozen),
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


def _needs_thread(config: RunConfig) -> bool:
  """Whether a second thread dispatches exchanges (`rounds.exchange_thread`).

  XLA overlaps transfers with steps on TPUs and GPUs. Between CPUs it does not,
  and inside one process there is no link.
  """
  mesh = config.mesh
  if mesh.exchange_dispatch != "auto":
    return mesh.exchange_dispatch == "thread"
  is_between_cpus = jax.process_count() > 1 and jax.default_backend() == "cpu"
  return is_between_cpus and mesh.outer_memory == host_memory.DEVICE


def _averaged(optimizer: optax.GradientTransformation, power: float):
  return averaged(optimizer, power) if power else optimizer


def outer_step(
  config: RunConfig, parts: Parts, aggregator: Aggregator
) -> OuterStep:
  """Builds the outer side of a round: exchange, outer optimizer, apply rule.

  Args:
    config: Config of the run.
    parts: Parts that take the place of what the config names.
    aggregator: Averages a fragment over the replicas.
  """
  outer = config.outer
  optimizer = parts.outer_optimizer
  if optimizer is None:
    optimizer = named_optimizer(
      outer.optimizer,
      outer.learning_rate,
      momentum=outer.momentum,
      nesterov=outer.nesterov and bool(outer.momentum),
    )
  return OuterStep(
    method=config.sync.named,
    optimizer=_averaged(optimizer, outer.average_power),
    aggregator=aggregator,
  )


def platform_name() -> str:
  """Returns the kind of JAX's devices: "cpu", "tpu", "gpu" (NVIDIA) or "rocm".

  JAX calls the GPUs of NVIDIA and AMD by one name, and only the first have
  cuDNN.
  """
  name = jax.default_backend()
  if name == "gpu" and "rocm" in jax.local_devices()[0].client.platform_version:
    return "rocm"
  return name
