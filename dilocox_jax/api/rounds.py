"""A method's rounds around one's own inner step, without a config.

The host goes from window to window of the schedule. The transfer of a delayed
method runs beside the inner steps of a window, which a transform of single
steps (`step_methods`) cannot offer.
"""

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.api.argument_kinds import (
  check_exchange,
  check_method,
  check_optimizer,
)
from dilocox_jax.api.step_methods import (
  CodecChoice,
  check_unsent,
  named_exchange,
)
from dilocox_jax.checks import require
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.exchange.feedback import Feedback
from dilocox_jax.outer.cuts import Cuts
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.outer.rounds import Rounds
from dilocox_jax.outer.window import InnerStep
from dilocox_jax.plan.schedule.fragments import BLOCKS, SLICED, Fragments
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.pytypes import Aggregator, Tree
from dilocox_jax.trees import leaves_by_path


def make_rounds(
  method: Method,
  inner_step: InnerStep,
  outer: optax.GradientTransformation,
  *,
  num_replicas: int,
  num_layers: int = 0,
  layout: str = "stacked",
  codec: CodecChoice = "float32",
  collective: str = "auto",
  error_feedback: bool = False,
  feedback_decay: float = 1.0,
  feedback_against: str = "own",
  feedback_dtype: str = "float32",
  keep_unsent: bool = False,
  seed: int = 0,
  exchange: Aggregator | None = None,
) -> Rounds:
  """Builds a method's rounds from an inner step of one's own.

  A method brings its schedule and its rule. Unlike `dilocox_jax.open_diloco`
  and the other transforms, rounds bring none of its recipe: codec, feedback and
  outer optimizer are those that are given here.

  Args:
    method: Schedule and rule, e.g. `plan.schedule.methods.dilocox(20)`.
    inner_step: (params, optimizer state, batch) -> (params, optimizer state,
      (loss, gradient norm)) of one replica; two float32 scalars.
    outer: Optimizer of the outer parameters.
    num_replicas: M.
    num_layers: Layers of the leaves below "blocks", their first axis; only
      needed for more than one fragment that is not sliced.
    layout: "stacked" (one device holds all replicas) or "mesh" (a device for
      each replica).
    codec: What is sent: a payload, its name, or its settings as in
      `config.codec`, e.g. {"name": "int", "bits": 4}.
    collective: What carries it: "auto" (the fewest bytes), "all_reduce",
      "all_gather" or "reduce_scatter".
    error_feedback: Whether what the codec lost is added to the next exchange.
    feedback_decay: Share of the residual that is kept, 0 to 1.
    feedback_against: What it is measured against, "own" or "mean".
    feedback_dtype: "float32", "bfloat16" or "int8", for the residual.
    keep_unsent: Whether what the codec lost stays in the replica's parameters.
    seed: Seed of random masks, first low-rank factors and stochastic rounding.
    exchange: An aggregator of one's own in place of codec and feedback.

  Raises:
    TypeError: If `method` is no method, `outer` no optimizer, or `exchange`
      no aggregator.
    ValueError: If the method averages gradients, or its fragments do not fit.
      The first round raises it if the results of `inner_step` do not fit.
  """
  check_method(method)
  check_optimizer("outer", outer)
  if method.exchanged == "gradient":
    raise ValueError(
      "a method that averages gradients has no rounds: take "
      "dilocox_jax.allreduce, which is a transform of single steps"
    )
  check_unsent(method, error_feedback, keep_unsent)
  is_sliced = method.fragment_order in SLICED
  if method.schedule.num_fragments > 1 and not is_sliced and num_layers < 1:
    raise ValueError(
      f"num_fragments={method.schedule.num_fragments} divides the layers of "
      f'leaves below "{BLOCKS}": give num_layers, or take '
      "dilocox_jax.step_transform, which divides any tree"
    )
  fragments = Fragments(
    method.schedule.num_fragments,
    max(num_layers, 1),
    method.fragment_order,
  )
  if exchange is None:
    feedback = Feedback(feedback_decay, feedback_against, feedback_dtype)
    exchange = named_exchange(
      codec,
      error_feedback,
      feedback,
      collective,
      seed,
      keep_unsent=keep_unsent,
    )
  check_exchange(exchange)
  return Rounds(
    OuterStep(method, outer, exchange, keep_unsent),
    Cuts(fragments.num_fragments, fragments),
    Replicas(num_replicas, layout),
    inner_step=_checked(inner_step),
  )


def _checked(inner_step: InnerStep) -> InnerStep:
  """Has an inner step say in one line which of its results do not fit.

  JAX would speak of the loop that the step runs in, and in many lines.
  """

  def step(params: Tree, optimizer: Tree, batch: Tree):
    results = inner_step(params, optimizer, batch)
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
  wanted, found = _kinds(before), _kinds(after)
  for path in wanted | found:
    require(
      wanted.get(path) == found.get(path),
      f"inner_step returns {what} whose leaf {path!r} is "
      f"{found.get(path, 'missing')}; it must be "
      f"{wanted.get(path, 'left out')}",
    )


def _kinds(tree: Tree) -> dict[str, str]:
  """Returns dtype and shape of each leaf, as text, e.g. "float32[8, 16]"."""
  kinds = {p: jax.typeof(leaf) for p, leaf in leaves_by_path(tree).items()}
  return {p: f"{kind.dtype}{list(kind.shape)}" for p, kind in kinds.items()}
