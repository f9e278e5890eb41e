"""A method's rounds around one's own inner step, without a config.

The host goes from window to window of the schedule. The transfer of a delayed
method runs beside the inner steps of a window, which a transform of single
steps (`step_methods`) cannot offer.
"""

import jax.numpy as jnp
import optax

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.api.step_methods import (
  aggregator_of,
  check_method,
  check_optimizer,
)
from dilocox_jax.checks import require
from dilocox_jax.distributed.replicas import (
  Replicas,
)
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import OuterStep
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
  exchange: Aggregator | MailboxExchange | str = "float32",
  frozen: Tree | None = None,
) -> Rounds:
  """Builds a method's rounds from an inner step of one's own.

  A method brings its schedule and its rule. Unlike `dilocox_jax.open_diloco`
  and the other transforms, rounds bring none of its recipe: codec, feedback and
  outer optimizer are those that are given here.

  Args:
    method: Schedule and rule, e.g. `plan.schedule.methods.dilocox(20)`.
    inner_step: (params, optimizer state, batch) -> (params, optimizer state,
      (loss, gradient norm)) of one replica; two float32 scalars. It may use
      collectives over the axis "replica", unless the replicas meet in a store.
    outer: Optimizer of the outer parameters.
    num_replicas: M.
    num_layers: Layers of the leaves below "blocks", their first axis; only
      needed for more than one fragment that is not sliced.
    layout: "stacked" (one device holds all replicas) or "mesh" (a device for
      each replica).
    exchange: What averages over replicas, e.g. `dilocox_jax.exchange(
      "int(bits=4)", feedback=1.0)`, or the name of a codec without feedback.
    frozen: Parameters that are read and not trained. They are on a device once,
      for all replicas, and `inner_step` gets them as its argument `frozen`.

  Raises:
    TypeError: If `method` is no method, `outer` no optimizer, or `exchange`
      no aggregator.
    ValueError: If the method averages gradients, or its fragments do not fit.
      The first round raises it if the results of `inner_step` do not fit, or
      if it uses the axis of replicas that meet in a store (`rounds.alone`).
  """
  check_method(method)
  check_optimizer("outer", outer)
  if method.exchanged == "gradient":
    raise ValueError(
      "a method that averages gradients has no rounds: take "
      "dilocox_jax.allreduce, which is a transform of single steps"
    )
  if isinstance(exchange, MailboxExchange):
    exchange_of_run = exchange
  else:
    exchange_of_run = LocalExchange(aggregator_of(exchange))
  is_sliced = method.fragment_order in SLICED
  if method.schedule.num_fragments > 1 and not is_sliced and num_layers < 1:
    raise ValueError(
      f"num_fragments={method.schedule.num_fragments} divides the layers of "
      f'leaves below "{BLOCKS}": give num_layers, or take '
      "dilocox_jax.step_transform, which divides any tree"
    )
  fragments = Fragments(
    method.schedule.num_fragments, max(num_layers, 1), method.fragment_order
  )
  step = OuterStep(method, outer, exchange_of_run.aggregator)
  replicas = Replicas(num_replicas, layout, axis_name=exchange_of_run.axis_name)
  rounds = Rounds(
    outer=step,
    view=FragmentView(fragments.num_fragments, fragments),
    replicas=replicas,
    inner_step=_checked(inner_step),
    make_runtime=exchange_of_run.make_runtime,
    frozen=None if frozen is None else replicas.place(frozen, None),
  )
  _ = rounds.runtime  # It refuses what it cannot run.
  exchange_of_run.enter(method, num_replicas)
  return rounds


def _checked(inner_step: InnerStep) -> InnerStep:
  """Has an inner step say in one line which of its results do not fit.

  JAX would speak of the loop that the step runs in, and in many lines.
  """

  def step(params: Tree, optimizer: Tree, batch: Tree, **others: Tree):
    results = inner_step(params, optimizer, batch, **others)
    try:
      new_params, new_optimizer, (loss, norm) = results
    except (TypeError, ValueError) as error:
      raise ValueError(
        "inner_step must return (params, optimizer state, (loss, gradient "
        f"norm)): {error}"
      ) from error
    _check_same("params", params, new_params)
    _check_same("optimizer state", optimizer, new_optimizer)
    for what, value in {"loss": loss, "gradient norm": norm}.items():
      require(
        not jnp.shape(value),
        f"inner_step returns a {what} of shape {jnp.shape(value)}; it must be "
        "a scalar",
      )
    return new_params, new_optimizer, (jnp.asarray(loss), jnp.asarray(norm))

  return step


def _check_same(what: str, before: Tree, after: Tree) -> None:
  """Raises ValueError if a step changes a tree, a shape or a dtype."""
  wanted, found = kinds_by_path(before), kinds_by_path(after)
  for path in wanted | found:
    require(
      wanted.get(path) == found.get(path),
      f"inner_step returns {what} whose leaf {path!r} is "
      f"{found.get(path, 'missing')}; it must be "
      f"{wanted.get(path, 'left out')}",
    )
