"""Trains many runs of one setting, a *population*, as one JAX program.

The rates and the seed of a run are arguments of the program. An inner
`jax.vmap` maps over the replicas of a run, and the exchange averages over the
axis of this vmap. An outer `jax.vmap` maps over the runs, which exchange
nothing with each other. A step of a replica is an update of an optax transform
(`api.step_methods.step_transform`).

Letters: R runs, M replicas, B sequences in a step of a replica, L tokens that a
sequence predicts, N batches of an evaluation.
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
from dilocox_jax.optimizers import learning_rate_schedule
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

# For a config in which rates and seed do not matter.
_ANY_RUN = Run(Rates(inner=1.0, outer=1.0), seed=0)
_EVALUATION_BATCH = 16  # Sequences that an evaluation reads at a time.


class Losses(NamedTuple):
  """Losses of a run after its last step, in nats a token.

  AllReduce's parameters count as outer parameters. The *judge text* is held-out
  text on which nothing is chosen. If there is none, the judge losses are those
  on the validation text.

  Attributes:
    newest: Loss of the newest outer parameters on the validation text.
    average: Loss of the average of the outer parameters on the validation text,
      by which rates are chosen.
    judge_newest: Loss of the newest outer parameters on the judge text.
    judge_average: Loss of the average on the judge text.
  """

  newest: float
  average: float
  judge_newest: float
  judge_average: float


class Models(NamedTuple):
  """Trained parameters of R runs.

  Attributes:
    newest: The newest outer parameters, leaves [R, ...].
    average: The average of the outer parameters, leaves [R, ...].
  """

  newest: Tree
  average: Tree


class Carry(NamedTuple):
  """The values of one run that a step changes.

  Attributes:
    params: Parameters of the M replicas, leaves [M, ...].
    state: State of each replica's optax transform, which takes the inner and
      the outer steps, leaves [M, ...].
  """

  params: Tree
  state: Tree


def train(setting: Setting, runs: Sequence[Run], text: Corpus) -> list[Losses]:
  """Trains runs of a setting to their end, and returns their losses in order.

  If the text has no judge part (on which nothing is chosen), the judge losses
  are those on the validation part.
  """
  # Runs with one seed read the same tokens, which are stored once.
  seeds = sorted({run.seed for run in runs})
  tokens = np.stack([training_tokens(setting, text, seed) for seed in seeds])
  text_indices = [seeds.index(run.seed) for run in runs]
  models = train_on(setting, runs, tokens, text_indices)
  validation = _held_out(setting, text.validation)
  judge_text = text.validation if text.judge is None else text.judge
  judge = _held_out(setting, judge_text)
  newest = evaluate(setting, models.newest, validation)
  average = evaluate(setting, models.average, validation)
  judge_newest = evaluate(setting, models.newest, judge)
  judge_average = evaluate(setting, models.average, judge)
  return [
    Losses(
      newest=float(newest[index]),
      average=float(average[index]),
      judge_newest=float(judge_newest[index]),
      judge_average=float(judge_average[index]),
    )
    for index in range(len(runs))
  ]


def training_tokens(setting: Setting, text: Corpus, seed: int) -> np.ndarray:
  """Returns the tokens that the replicas of a run read, in the text's dtype.

  Two settings read the same sequences in a step if they have the same text,
  seed, sequence length and number of sequences of all replicas together.

  Returns:
    Tokens [steps, M, B, L + 1]: in a step, each of M replicas takes B sequences
    of L + 1 tokens.
  """
  # One stream with the sequences of all replicas, which are divided below. So
  # the number of replicas does not change what is read in a step.
  stream = ReplicaStreams(
    text.train,
    num_replicas=1,
    batch_size=setting.global_batch,
    sequence_length=setting.sequence_length,
    seed=seed,
  )
  tokens = stream.take(setting.steps).astype(text.train.dtype)
  return tokens.reshape(setting.steps, setting.replicas, setting.batch, -1)


def train_on(
  setting: Setting,
  runs: Sequence[Run],
  tokens: np.ndarray,
  text_indices: Sequence[int],
) -> Models:
  """Trains runs to their end on arrays of tokens.

  Args:
    setting: Setting of the runs.
    runs: Rates and seed of each of the R runs.
    tokens: Stacked results of `training_tokens`, [texts, steps, M, B, L + 1].
    text_indices: For each run, the index of its text on the first axis of
      `tokens`, [R].
  """
  program = _programs(setting)
  return program.train(
    np.asarray([run.rates.inner for run in runs], np.float32),
    np.asarray([run.rates.outer for run in runs], np.float32),
    np.asarray([run.seed for run in runs], np.uint32),
    np.asarray(text_indices, np.int32),
    tokens,
  )


def evaluate(setting: Setting, params: Tree, batches: np.ndarray) -> np.ndarray:
  """Returns the mean loss of each run (nats a token), [R].

  Args:
    setting: Setting of the runs.
    params: Parameters of the runs, leaves [R, ...].
    batches: N batches of held-out sequences of L + 1 tokens,
      [N, sequences, L + 1].
  """
  return np.asarray(_programs(setting).evaluate(params, batches))


@functools.cache
def sent_bytes(setting: Setting) -> int:
  """Returns the bytes that one replica sends in a run.

  They include exchanges that are still due after the last inner step.
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
    train: `_OneRun.train` for many runs: (inner rates [R], outer rates [R],
      seeds [R], indices of texts [R], tokens) -> `Models`.
    evaluate: (parameters [R, ...], batches [N, sequences, L + 1]) -> losses
      [R].
  """

  train: Callable[..., Models]
  evaluate: Callable[..., Array]


@functools.lru_cache(maxsize=2)
def _programs(setting: Setting) -> _Programs:
  """Builds the programs that train and evaluate many runs of a setting."""
  config = setting.config(_ANY_RUN)
  computation = on_platform(config, build.platform_name())
  model, gradient, evaluation = model_functions(
    config,
    computation,
    config.division,
    gather="stage",
    supplied=None,
    end_of_text=None,
  )
  # On CPUs products of stacked matrices are slower.
  if computation.stacked_by == "map":
    evaluation = sequential_vmap(evaluation)
  one_run = _OneRun(setting, config, init=model.init, gradient=gradient)
  # All runs get the same array of tokens.
  train = jax.vmap(one_run.train, in_axes=(0, 0, 0, 0, None))
  evaluate = jax.vmap(evaluation, in_axes=(0, None))
  return _Programs(train=jax.jit(train), evaluate=jax.jit(evaluate))


class _OneRun:
  """The program of one run of a setting.

  JAX traces the rates, the seed and the text of the run, so the program serves
  all runs of the setting.
  """

  def __init__(
    self,
    setting: Setting,
    config: RunConfig,
    init: Callable[[Array], Tree],
    gradient: Callable[[Tree, Tree], Any],
  ):
    """Keeps the parts of the program.

    Args:
      setting: Setting of the run.
      config: Config of any run of the setting. Its rates and seed are not read.
      init: Makes the first parameters from a random key.
      gradient: (params, batch) -> (loss, gradients), for one replica.
    """
    self.setting = setting
    self.config = config
    self.init = init
    self.gradient = gradient

  def train(
    self,
    inner_rate: Array,
    outer_rate: Array,
    seed: Array,
    text_index: Index,
    tokens: Array,
  ) -> Models:
    """Trains one run, and returns its parameters without an axis of runs.

    Args:
      inner_rate: Highest inner learning rate, a float32 scalar.
      outer_rate: Outer learning rate, a float32 scalar; AllReduce does not read
        it.
      seed: Seed of the first parameters, a uint32 scalar.
      text_index: Index in `tokens` of the text of this run, an int32 scalar.
      tokens: Results of `training_tokens`, [texts, steps, M, B, L + 1].
    """
    setting = self.setting
    params = self._copies(self.init(jax.random.key(seed)))
    inner = self._inner_optimizer(inner_rate)

    def batch_of(step: Index) -> Array:
      return tokens[text_index, step].astype(jnp.int32)

    if setting.is_allreduce:
      transform = self._data_parallel(averaged(inner, self._average_power))
      carry = self._first_carry(transform, params)
      carry = self._take_steps(
        transform, carry, batch_of=batch_of, start=0, stop=setting.steps
      )
      return self._models(carry)
    inner_state = self._copies(inner.init(self._first_copy(params)))
    if setting.warm_start:
      transform = self._data_parallel(inner)
      carry = self._first_carry(transform, params)
      carry = self._take_steps(
        transform, carry, batch_of=batch_of, start=0, stop=setting.warm_start
      )
      params = carry.params
      inner_state = carry.state.inner
    # The outer parameters begin as the parameters after the warm start, and the
    # inner optimizer keeps its state.
    transform = self._rounds(inner, outer_rate)
    carry = self._first_carry(transform, params)
    state = carry.state._replace(inner=inner_state)
    carry = carry._replace(state=state)
    carry = self._take_steps(
      transform,
      carry,
      batch_of=batch_of,
      start=setting.warm_start,
      stop=setting.steps,
    )
    if setting.delay:
      carry = self._flush(transform, carry)
    return self._models(carry)

  @property
  def _average_power(self) -> float:
    """Power of the average of the parameters (`outer.average_power`)."""
    return self.config.outer.average_power

  def _inner_optimizer(self, rate: Array) -> optax.GradientTransformation:
    """Builds the inner optimizer; its rate is 0 after the last inner step.

    `rate` is the highest rate of its schedule.
    """
    inner = self.config.inner
    schedule = learning_rate_schedule(
      inner.schedule,
      rate,  # pyright: ignore[reportArgumentType]
      warmup_steps=inner.warmup_steps,
      total_steps=self.setting.steps,
      final_fraction=inner.final_fraction,
    )

    # `_flush` takes further steps, in which the inner optimizer must not act.
    def rate_of(count: Any) -> Any:
      return jnp.where(count < self.setting.steps, schedule(count), 0.0)

    return build.named_inner_optimizer(inner, rate_of)

  def _data_parallel(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformationExtraArgs:
    """Returns a transform: `inner`, on gradients averaged over the replicas."""
    return step_transform(METHODS["allreduce"](), inner)

  def _rounds(
    self, inner: optax.GradientTransformation, outer_rate: Array
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the transform that takes inner and outer steps."""
    config = self.config
    return step_transform(
      config.sync.named,
      inner,
      build.outer_optimizer(config, outer_rate),
      exchange=build.run_exchange(config).aggregator,
      fragments=config.fragments,
    )

  def _copies(self, tree: Tree) -> Tree:
    """Returns M copies of a tree, with leaves [M, ...]."""
    num_replicas = self.setting.replicas
    return jax.tree.map(
      lambda leaf: jnp.broadcast_to(leaf, (num_replicas, *jnp.shape(leaf))),
      tree,
    )

  def _first_copy(self, tree: Tree) -> Tree:
    """Returns the values of replica 0 of a tree with leaves [M, ...]."""
    return jax.tree.map(lambda leaf: leaf[0], tree)

  def _first_carry(self, transform: Any, params: Tree) -> Carry:
    """Returns `params` with a new state of the transform for each replica.

    `params` has the parameters of all replicas, leaves [M, ...].
    """
    return Carry(params=params, state=jax.vmap(transform.init)(params))

  def _take_steps(
    self,
    transform: optax.GradientTransformationExtraArgs,
    carry: Carry,
    batch_of: Callable[[Index], Array],
    start: int,
    stop: int,
  ) -> Carry:
    """Takes inner steps `start` to `stop` - 1 of all replicas of a run.

    `batch_of` returns the tokens of a step, [M, B, L + 1].
    """

    def replica_step(params: Tree, state: Tree, batch: Tree) -> Carry:
      _, gradients = self.gradient(params, batch)
      updates, state = transform.update(gradients, state, params)
      return Carry(optax.apply_updates(params, updates), state)

    step_of_replicas = jax.vmap(replica_step, axis_name=REPLICA_AXIS)

    def body(carry: Carry, step: Index) -> tuple[Carry, None]:
      return step_of_replicas(*carry, batch_of(step)), None

    steps = jnp.arange(start, stop, dtype=jnp.int32)
    carry, _ = jax.lax.scan(body, carry, steps)
    return carry

  def _flush(
    self, transform: optax.GradientTransformationExtraArgs, carry: Carry
  ) -> Carry:
    """Makes the exchanges that are still due after the last inner step.

    It takes one more round of steps, with gradients and inner rate of 0.
    """

    def replica_step(params: Tree, state: Tree) -> Carry:
      zeros = jax.tree.map(jnp.zeros_like, params)
      updates, state = transform.update(zeros, state, params)
      return Carry(optax.apply_updates(params, updates), state)

    step_of_replicas = jax.vmap(replica_step, axis_name=REPLICA_AXIS)

    def body(carry: Carry, _: None) -> tuple[Carry, None]:
      return step_of_replicas(*carry), None

    carry, _ = jax.lax.scan(body, carry, length=self.setting.interval)
    return carry

  def _models(self, carry: Carry) -> Models:
    """Returns the parameters to evaluate, which are equal in all replicas."""
    average = outer_params(carry.state, carry.params)
    return Models(
      newest=self._first_copy(carry.params), average=self._first_copy(average)
    )


def _held_out(setting: Setting, tokens: np.ndarray) -> np.ndarray:
  """Returns the batches of an evaluation, [N, sequences, L + 1]."""
  (batches,) = held_out_batches(
    tokens,
    batch_size=_EVALUATION_BATCH,
    sequence_length=setting.sequence_length,
    max_sequences=NUM_VALIDATION_SEQUENCES,
  )
  return batches
