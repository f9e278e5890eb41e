"""Trains many runs of one setting as one program.

Rates, seeds and first parameters are data of the program. Replicas are mapped
by `jax.vmap` under the axis name of the exchange, and runs by another
`jax.vmap` around it, so that no run knows of another one. Each step is that of
the transforms that the package offers (`api.step_methods`). On CPUs the
gradients of all replicas are computed in turn, because that is faster there
than products of stacked matrices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import sequential_vmap

from dilocox_jax.api.step_methods import step_transform
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.config.platforms import on_platform
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.streams import ReplicaStreams, held_out_batches
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.optimizers import inner_optimizer, learning_rate_schedule
from dilocox_jax.outer.average import averaged
from dilocox_jax.outer.step_state import outer_params
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.training import build
from dilocox_jax.training.model_functions import model_functions
from dilocox_jax.trees import Array, Index, Tree
from experiments.gaps.settings import (
  NUM_VALIDATION_SEQUENCES,
  Rates,
  Run,
  Setting,
)

_ANY_RUN = Run(Rates(inner=1.0, outer=1.0), seed=0)
_EVALUATION_BATCH = 16  # Sequences that an evaluation reads at a time.


class Losses(NamedTuple):
  """Losses of a run after its last step, in nats a token.

  Attributes:
    newest: Of the newest outer parameters, on the text that chooses rates.
    average: Of the average of the outer parameters, on the same text.
    judge_newest: Of the newest outer parameters, on the text that judges.
    judge_average: Of the average, on the text that judges.
  """

  newest: float
  average: float
  judge_newest: float
  judge_average: float


class Models(NamedTuple):
  """Trained parameters of all runs, leaves [R, ...]."""

  newest: Tree
  average: Tree


class Carry(NamedTuple):
  """What a step changes of one run, leaves [M, ...]."""

  params: Tree
  state: Tree


def train(setting: Setting, runs: Sequence[Run], text: Corpus) -> list[Losses]:
  """Trains runs of a setting to their end and evaluates them.

  Args:
    setting: What the runs have in common.
    runs: Rates and seeds.
    text: Text that they are trained on.

  Returns:
    Losses of each run.
  """
  seeds = sorted({run.seed for run in runs})
  tokens = np.stack([training_tokens(setting, text, seed) for seed in seeds])
  numbers = [seeds.index(run.seed) for run in runs]
  models = train_on(setting, runs, tokens, numbers)
  judging = text.validation if text.judge is None else text.judge
  found = [
    evaluate(setting, model, batches)
    for batches in (
      _held_out(setting, text.validation),
      _held_out(setting, judging),
    )
    for model in models
  ]
  return [Losses(*map(float, losses)) for losses in zip(*found, strict=True)]


def training_tokens(setting: Setting, text: Corpus, seed: int) -> np.ndarray:
  """Returns what the replicas of a run read, in the type of the text.

  A step reads the same sequences for all numbers of replicas whose batches are
  equal together. Replicas have no sequence in common within a pass over the
  text.

  Args:
    setting: Setting of the run.
    text: The text.
    seed: Seed of the order of its sequences.

  Returns:
    Tokens [steps, M, B, L + 1].
  """
  stream = ReplicaStreams(
    text.train,
    num_replicas=1,
    batch_size=setting.global_batch,
    sequence_length=setting.sequence_length,
    seed=seed,
  )
  tokens = stream.take(setting.steps).astype(text.train.dtype)
  shape = setting.steps, setting.replicas, setting.batch, -1
  return tokens.reshape(shape)


def train_on(
  setting: Setting,
  runs: Sequence[Run],
  tokens: np.ndarray,
  numbers: Sequence[int],
) -> Models:
  """Trains runs on given tokens.

  Args:
    setting: What the runs have in common.
    runs: Rates and seeds, R of them.
    tokens: Some texts [texts, steps, M, B, L + 1].
    numbers: Number of the text of each run, [R].
  """
  program = _programs(setting)
  return program.train(
    np.asarray([run.rates.inner for run in runs], np.float32),
    np.asarray([run.rates.outer for run in runs], np.float32),
    np.asarray([run.seed for run in runs], np.uint32),
    np.asarray(numbers, np.int32),
    tokens,
  )


def evaluate(setting: Setting, params: Tree, batches: np.ndarray) -> np.ndarray:
  """Returns the mean loss of each run, [R].

  Args:
    setting: Setting of the runs.
    params: Parameters, leaves [R, ...].
    batches: Held-out tokens [N, B, L + 1].
  """
  return np.asarray(_programs(setting).evaluate(params, batches))


@functools.cache
def sent_bytes(setting: Setting) -> int:
  """Returns the bytes that one replica sends in a run, flush included.

  Args:
    setting: Setting of the run.
  """
  config = setting.config(_ANY_RUN)
  plan = to_plan.run_plan(config)
  traffic = to_plan.traffic(config)
  total = sum(map(traffic.segment_bytes, plan.segments()))
  if setting.is_allreduce:
    return total
  return total + traffic.flush_bytes(plan.schedule_step(setting.steps))


class _Programs(NamedTuple):
  """Compiled programs of a setting.

  Attributes:
    train: (inner rates [R], outer rates [R], seeds [R], numbers of texts [R],
      tokens) -> `Models`.
    evaluate: (parameters [R, ...], batches [N, B, L + 1]) -> losses [R].
  """

  train: Callable[..., Models]
  evaluate: Callable[..., Array]


@functools.lru_cache(maxsize=2)
def _programs(setting: Setting) -> _Programs:
  """Builds the programs of a setting; JAX compiles them at their first call."""
  config = setting.config(_ANY_RUN)
  computation = on_platform(config, build.platform_name())
  model, gradient, evaluation = model_functions(
    config, computation, config.division, supplied=None, end_of_text=None
  )
  if computation.stacked_by == "map":
    evaluation = sequential_vmap(evaluation)
  one_run = _OneRun(setting, config, model.init, gradient)
  train = jax.vmap(one_run.train, in_axes=(0, 0, 0, 0, None))
  evaluate = jax.vmap(evaluation, in_axes=(0, None))
  return _Programs(jax.jit(train), jax.jit(evaluate))


class _OneRun:
  """The program of one run, whose rates and seed are traced values."""

  def __init__(
    self,
    setting: Setting,
    config: RunConfig,
    init: Callable[[Array], Tree],
    gradient: Callable[[Tree, Tree], Any],
  ):
    self.setting = setting
    self.config = config
    self.init = init
    self.gradient = gradient

  def train(
    self,
    inner_rate: Array,
    outer_rate: Array,
    seed: Array,
    number: Index,
    tokens: Array,
  ) -> Models:
    """Trains one run.

    Args:
      inner_rate: Highest inner learning rate, a float32 scalar.
      outer_rate: Outer learning rate; AllReduce does not read it.
      seed: Seed of the first parameters.
      number: Number of its text.
      tokens: Texts [texts, steps, M, B, L + 1].
    """
    setting = self.setting
    params = self._copies(self.init(jax.random.key(seed)))
    inner = self._inner_optimizer(inner_rate)

    def batch_of(step: Index) -> Array:
      return tokens[number, step].astype(jnp.int32)

    if setting.is_allreduce:
      transform = self._data_parallel(averaged(inner, self._power))
      carry = self._first(transform, params)
      carry = self._steps(transform, carry, batch_of, 0, setting.steps)
      return self._models(carry)
    inner_state = self._copies(inner.init(self._first_copy(params)))
    if setting.warm_start:
      transform = self._data_parallel(inner)
      carry = self._first(transform, params)
      carry = self._steps(transform, carry, batch_of, 0, setting.warm_start)
      params = carry.params
      inner_state = carry.state.inner
    transform = self._rounds(inner, outer_rate)
    carry = self._first(transform, params)
    state = carry.state._replace(inner=inner_state)
    carry = carry._replace(state=state)
    carry = self._steps(
      transform, carry, batch_of, setting.warm_start, setting.steps
    )
    if setting.delay:
      carry = self._flush(transform, carry)
    return self._models(carry)

  @property
  def _power(self) -> float:
    return self.config.outer.average_power

  def _inner_optimizer(self, rate: Array) -> optax.GradientTransformation:
    """Builds the inner optimizer; after the last step its rate is 0."""
    inner = self.config.inner
    schedule = learning_rate_schedule(
      inner.schedule,
      rate,  # pyright: ignore[reportArgumentType]
      warmup_steps=inner.warmup_steps,
      total_steps=self.setting.steps,
      final_fraction=inner.final_fraction,
    )

    def until_the_end(count: Any) -> Any:
      return jnp.where(count < self.setting.steps, schedule(count), 0.0)

    return inner_optimizer(
      inner.optimizer,
      until_the_end,
      inner.changed_options,
      clip_norm=inner.clip_norm,
      b1=inner.b1,
      b2=inner.b2,
      weight_decay=inner.weight_decay,
      momentum=inner.momentum,
    )

  def _data_parallel(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformationExtraArgs:
    return step_transform(METHODS["allreduce"](), inner)

  def _rounds(
    self, inner: optax.GradientTransformation, rate: Array
  ) -> optax.GradientTransformationExtraArgs:
    config = self.config
    momentum = config.outer.momentum
    outer = optax.sgd(rate, momentum or None, nesterov=bool(momentum))
    return step_transform(
      config.sync.named,
      inner,
      averaged(outer, self._power),
      exchange=build.run_exchange(config).aggregator,
      fragments=config.fragments,
    )

  def _copies(self, tree: Tree) -> Tree:
    """Returns M copies of a tree, leaves [M, ...]."""
    count = self.setting.replicas
    return jax.tree.map(
      lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))), tree
    )

  def _first_copy(self, tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf[0], tree)

  def _first(self, transform: Any, params: Tree) -> Carry:
    return Carry(params, jax.vmap(transform.init)(params))

  def _steps(
    self,
    transform: optax.GradientTransformationExtraArgs,
    carry: Carry,
    batch_of: Callable[[Index], Array],
    start: int,
    stop: int,
  ) -> Carry:
    """Takes the steps from `start` to `stop` of all replicas of a run."""

    def replica_step(params: Tree, state: Tree, batch: Tree):
      _, gradients = self.gradient(params, batch)
      updates, state = transform.update(gradients, state, params)
      return Carry(optax.apply_updates(params, updates), state)

    replicas_step = jax.vmap(replica_step, axis_name=REPLICA_AXIS)

    def body(carry: Carry, step: Index) -> tuple[Carry, None]:
      return replicas_step(*carry, batch_of(step)), None

    steps = jnp.arange(start, stop, dtype=jnp.int32)
    return jax.lax.scan(body, carry, steps)[0]

  def _flush(
    self, transform: optax.GradientTransformationExtraArgs, carry: Carry
  ) -> Carry:
    """Applies what is in flight, and what was not sent yet.

    A round of steps without a gradient and with a learning rate of 0 changes no
    parameters by itself, and has the sends and applies of a flush.
    """

    def replica_step(params: Tree, state: Tree):
      zeros = jax.tree.map(jnp.zeros_like, params)
      updates, state = transform.update(zeros, state, params)
      return Carry(optax.apply_updates(params, updates), state)

    replicas_step = jax.vmap(replica_step, axis_name=REPLICA_AXIS)

    def body(carry: Carry, _: None) -> tuple[Carry, None]:
      return replicas_step(*carry), None

    return jax.lax.scan(body, carry, length=self.setting.interval)[0]

  def _models(self, carry: Carry) -> Models:
    """Returns what is evaluated; all replicas agree in it."""
    average = outer_params(carry.state, carry.params)
    return Models(
      newest=self._first_copy(carry.params), average=self._first_copy(average)
    )


def _held_out(setting: Setting, tokens: np.ndarray) -> np.ndarray:
  """Returns the sequences of every evaluation, [N, B, L + 1]."""
  (batches,) = held_out_batches(
    tokens,
    batch_size=_EVALUATION_BATCH,
    sequence_length=setting.sequence_length,
    max_sequences=NUM_VALIDATION_SEQUENCES,
  )
  return batches
