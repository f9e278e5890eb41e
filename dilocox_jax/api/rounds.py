"""Builds a method's rounds around a user's inner step, without a config.

A round is some inner steps and their exchanges. If the method applies a mean
some steps after the exchange began, messages travel while these steps run. An
optax transform (`api.step_methods`) cannot do this, because it ends each step
before the next one starts.
"""

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.api.step_methods import (
  aggregator_of,
  check_kind,
  check_method,
  check_optimizer,
)
from dilocox_jax.checks import of_type, require
from dilocox_jax.distributed.local_map import divided
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.inner import automatic
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.schedule.fragments import BLOCKS, SLICED, Fragments
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.rounds.exchanges import LocalExchange, MailboxExchange
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.rounds.window import InnerStep
from dilocox_jax.trees import Tree, kinds_by_path


def make_rounds(
  method: Method,
  inner_step: InnerStep,
  outer: optax.GradientTransformation,
  *,
  num_replicas: int,
  num_layers: int = 0,
  layout: str = "stacked",
  division: Division | None = None,
  exchange: Aggregator | MailboxExchange | str = "float32",
  frozen: Tree | None = None,
) -> Rounds:
  """Builds a method's rounds from a user's inner step.

  A round is H inner steps, in which each fragment (a part of the parameters) is
  sent once. Codec, error feedback and outer optimizer come from the arguments,
  not from a recipe.

  Args:
    method: When a fragment is sent and its mean applied, and how a replica goes
      on with the mean, e.g. `plan.schedule.methods.dilocox(20)`.
    inner_step: Function (params, optimizer state, batch) -> (params, optimizer
      state, (loss, gradient norm)) of one replica. Loss and norm are float32
      scalars. It may use collectives over the axis "replica", unless `exchange`
      is a mailbox.
    outer: Optimizer of the outer parameters.
    num_replicas: Number of replicas, M.
    num_layers: Size of the first axis of the leaves below the key "blocks".
      Only needed if the method has several fragments that are groups of layers.
    layout: "stacked" (one device holds all replicas) or "mesh" (each replica
      has devices of its own).
    division: How several devices divide a replica (`dilocox_jax.divide_model`),
      for the layout "mesh". None: a replica has one device.
    exchange: Aggregator or mailbox that averages over replicas, e.g.
      `dilocox_jax.exchange("int(bits=4)", feedback=1.0)`; or the name of a
      codec, which is then used without error feedback.
    frozen: Parameters that are read but not trained, which `inner_step` gets as
      the keyword argument `frozen`. None: there are no such parameters.

  Returns:
    The rounds. `init`, `run` and `flush` (the last exchanges) train with them.

  Raises:
    TypeError: If `method` is not a method, `inner_step` is not a function,
      `outer` is not an optimizer, `division` is not a `Division`, or `exchange`
      is neither an aggregator, a mailbox nor a name.
    ValueError: One line, if an argument is wrong. For example, the method
      averages gradients, `num_layers` is missing or too small for the method's
      fragments, or there are too few devices for the layout "mesh". The first
      round raises it if `inner_step` returns wrong shapes or dtypes, or uses
      the axis "replica" with a mailbox.
  """
  check_method(method)
  check_kind(
    callable(inner_step),
    "inner_step",
    inner_step,
    "a function (params, optimizer state, batch) -> (params, optimizer state, "
    "(loss, gradient norm))",
  )
  check_optimizer("outer", outer)
  check_kind(
    isinstance(division, Division | None),
    "division",
    division,
    "a dilocox_jax.Division, as dilocox_jax.divide_model returns it",
  )
  num_replicas = of_type("num_replicas", num_replicas, int)
  num_layers = of_type("num_layers", num_layers, int)
  if method.exchanged == "gradient":
    raise ValueError(
      "a method that averages gradients has no rounds: take "
      "dilocox_jax.allreduce, which is a transform of single steps"
    )
  if isinstance(exchange, MailboxExchange):
    run_exchange = exchange
  else:
    run_exchange = LocalExchange(aggregator_of(exchange))
  num_fragments = method.schedule.num_fragments
  is_sliced = method.fragment_order in SLICED
  if num_fragments > 1 and not is_sliced and num_layers < 1:
    raise ValueError(
      f"num_fragments={num_fragments} divides the layers of "
      f'leaves below "{BLOCKS}": give num_layers, or take '
      "dilocox_jax.step_transform, which divides any tree"
    )
  fragments = Fragments(
    num_fragments, max(num_layers, 1), method.fragment_order
  )
  if division is None:
    division = Division()
  replicas = Replicas(
    num_replicas,
    layout,
    division=division,
    axis_name=run_exchange.axis_name,
  )
  if frozen is not None:
    frozen = replicas.place_state(frozen, None)
  rounds = Rounds(
    outer=OuterStep(method, outer, run_exchange.aggregator),
    view=FragmentView(num_fragments, fragments),
    replicas=replicas,
    inner_step=_divided(_checked(inner_step), division),
    make_runtime=run_exchange.make_runtime,
    frozen=frozen,
  )
  # This builds the runtime, which raises an error if it cannot run the method.
  _ = rounds.runtime
  run_exchange.enter(method, num_replicas)
  return rounds


def _divided(inner_step: InnerStep, division: Division) -> InnerStep:
  """Wraps an inner step so that the devices of a replica divide its work.

  Data shards divide the rows of a batch, and the new parameters are divided
  like the old ones. With one device, the step is returned unchanged.
  """
  if division.num_devices == 1:
    return inner_step

  def step(params: Tree, optimizer: Tree, batch: Tree, **frozen: Tree):
    rows = automatic.divided_rows(batch)
    # XLA would abort a step that looks up rows of a divided table.
    params = automatic.with_whole_tables(division, params)
    frozen = automatic.with_whole_tables(division, frozen)
    params, optimizer, metrics = inner_step(params, optimizer, rows, **frozen)
    params = divided(division, params)
    return params, optimizer, metrics

  return step


def _checked(inner_step: InnerStep) -> InnerStep:
  """Wraps an inner step, and checks its results when JAX traces it.

  A wrong result raises a ValueError of one line that names the result.
  """

  def step(params: Tree, optimizer: Tree, batch: Tree, **frozen: Tree):
    results = inner_step(params, optimizer, batch, **frozen)
    try:
      new_params, new_optimizer, (loss, norm) = results
    except (TypeError, ValueError) as error:
      raise ValueError(
        "inner_step must return (params, optimizer state, (loss, gradient "
        f"norm)): {error}"
      ) from error
    _check_same("params", params, new_params)
    _check_same("optimizer state", optimizer, new_optimizer)
    _check_scalar("loss", loss)
    _check_scalar("gradient norm", norm)
    return new_params, new_optimizer, (jnp.asarray(loss), jnp.asarray(norm))

  return step


def _check_scalar(name: str, value: ArrayLike) -> None:
  """Raises ValueError if a result of the inner step is not a scalar."""
  require(
    not jnp.shape(value),
    f"inner_step returns a {name} of shape {jnp.shape(value)}; it must be "
    "a scalar",
  )


def _check_same(name: str, before: Tree, after: Tree) -> None:
  """Raises ValueError if a step changes a tree's paths, shapes or dtypes."""
  kinds_before = kinds_by_path(before)
  kinds_after = kinds_by_path(after)
  for path in kinds_before | kinds_after:
    require(
      kinds_before.get(path) == kinds_after.get(path),
      f"inner_step returns {name} whose leaf {path!r} is "
      f"{kinds_after.get(path, 'missing')}; it must be "
      f"{kinds_before.get(path, 'left out')}",
    )
