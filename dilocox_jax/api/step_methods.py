"""The named methods as optax transforms, for anybody's training loop.

A transform runs in the code of one replica, under an axis name that the caller
binds with `jax.vmap`, `jax.shard_map` or `jax.pmap`.
"""

import difflib
import inspect
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

import optax

from dilocox_jax.api.argument_kinds import (
  check_exchange,
  check_method,
  check_optimizer,
)
from dilocox_jax.config.recipes import DEFAULTS, RECIPES
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.exchange.compressed import Compression
from dilocox_jax.exchange.feedback import Feedback, mean_over_replicas
from dilocox_jax.outer.average import averaged, check_outermost
from dilocox_jax.outer.cuts import Cuts, Fragmentation
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.outer.step_state import GradientState
from dilocox_jax.outer.step_transform import check_axis, pseudo_gradient_steps
from dilocox_jax.outer.trained_leaves import on_trained_leaves
from dilocox_jax.plan.schedule.fragments import ORDERS, SLICED, Fragments
from dilocox_jax.plan.schedule.methods import METHODS, Method
from dilocox_jax.plan.wire.collectives import check_collective
from dilocox_jax.plan.wire.payload import Payload
from dilocox_jax.plan.wire.payload_names import named_payload
from dilocox_jax.pytypes import Aggregator, Tree
from dilocox_jax.trees import has_values

# What is sent: a payload, its name, or its settings as in `config.codec`.
CodecChoice = Payload | str | Mapping[str, Any]


def step_transform(
  method: Method,
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation | None = None,
  *,
  axis_name: str = REPLICA_AXIS,
  codec: CodecChoice = "float32",
  collective: str = "auto",
  error_feedback: bool = False,
  feedback_decay: float = 1.0,
  feedback_against: str = "own",
  feedback_dtype: str = "float32",
  keep_unsent: bool = False,
  seed: int = 0,
  fragments: Fragmentation | None = None,
  exchange: Aggregator | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Makes an optax transform of a method.

  A step's program cannot hide a transfer behind later steps, since each step
  ends before the next one begins: the rounds of `make_rounds` can.

  Args:
    method: Schedule and rule, e.g. `plan.schedule.methods.diloco(32)`.
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters; it is given the averaged
      pseudo-gradient of one fragment. None, and not read, for methods that
      average gradients. The functions of named methods bring one.
    axis_name: Axis over which replicas are mapped.
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
    fragments: How the tree is divided. A function from the path of a leaf, such
      as "layers/0/kernel", to its fragment, 0 to P - 1; a list of the pieces
      of each fragment (`plan.schedule.leaf_fragments.LeafPiece`); or
      `plan.schedule.fragments.Fragments`, which divides stacked layers. None
      divides whole leaves such that the fragments have about equal bytes, or
      slices every leaf if the method does.
    exchange: An aggregator of one's own in place of codec and feedback.

  Returns:
    A transform whose `init` takes the parameters of one replica, a tree of
    arrays of any shapes, and whose `update(grads, state, params)` returns what
    `optax.apply_updates` adds to them. Arrays of real floats are trained;
    integers and booleans stay as they are (`outer.trained_leaves`). Outer
    parameters and what is in flight have the types of the parameters. It must
    be the last transformation, as nothing may change its updates afterwards,
    and every replica must call it in every step: what may skip a step belongs
    into `inner`.

  Raises:
    TypeError: If `method` is no method, `inner` or `outer` no optimizer, or
      `exchange` no aggregator.
    ValueError: One line that names what does not fit.
  """
  check_method(method)
  check_optimizer("inner", inner)
  if outer is not None:
    check_optimizer("outer", outer)
  check_unsent(method, error_feedback, keep_unsent)
  if exchange is None:
    feedback = Feedback(feedback_decay, feedback_against, feedback_dtype)
    exchange = named_exchange(
      codec,
      error_feedback,
      feedback,
      collective,
      seed,
      axis_name,
      keep_unsent,
    )
  check_exchange(exchange)
  if method.exchanged == "gradient":
    return on_trained_leaves(_averaged_gradients(inner, exchange, axis_name))
  if outer is None:
    raise ValueError("outer=None: this method needs an outer optimizer")
  count = method.schedule.num_fragments
  if fragments is None and method.fragment_order in SLICED:
    fragments = Fragments(count, 1, method.fragment_order)
  step = OuterStep(method, outer, exchange, keep_unsent, axis_name)
  cuts = Cuts(count, _hashable(fragments))
  return on_trained_leaves(pseudo_gradient_steps(step, inner, cuts))


def named_exchange(
  codec: CodecChoice,
  error_feedback: bool,
  feedback: Feedback,
  collective: str = "auto",
  seed: int = 0,
  axis_name: str = REPLICA_AXIS,
  keep_unsent: bool = False,
) -> Aggregator:
  """Builds the aggregator that the names mean.

  Args:
    codec: As in `step_transform`, and so are the others.
    error_feedback: Whether what the codec lost is added to the next exchange.
    feedback: How much of it, and how.
    collective: Which collective carries it.
    seed: Seed of random masks, first factors and stochastic rounding.
    axis_name: Axis over which replicas are mapped.
    keep_unsent: Whether what the codec lost stays in the replica's parameters.
  """
  if isinstance(codec, str):
    codec = {"name": codec}
  payload: Any = codec
  if isinstance(codec, Mapping) and "name" in codec:
    payload = named_payload(**codec)
  if not isinstance(payload, Payload):
    raise ValueError(
      f"codec={codec!r} must be a name, a payload, or settings with a name, "
      'e.g. {"name": "int", "bits": 4}'
    )
  check_collective(payload, collective)
  return mean_over_replicas(
    Compression(
      payload, collective, seed, axis_name=axis_name, keep_unsent=keep_unsent
    ),
    feedback if error_feedback else None,
  )


def check_unsent(
  method: Method, error_feedback: bool, keep_unsent: bool
) -> None:
  """Raises ValueError if nothing, or two things, would keep what a codec lost.

  Args:
    method: Schedule and rule.
    error_feedback: Whether it is added to the next exchange.
    keep_unsent: Whether it stays in the replica's parameters.
  """
  if not keep_unsent:
    return
  if error_feedback:
    raise ValueError(
      "error_feedback and keep_unsent both make up for what a codec loses: "
      "set one of them to False"
    )
  if not method.can_keep_unsent:
    raise ValueError(
      "keep_unsent=True needs replicas that go on from the outer parameters "
      "at once, or rule 'continue': take error_feedback=True"
    )


def _hashable(fragments: Fragmentation | None) -> Fragmentation | None:
  if isinstance(fragments, int):
    raise ValueError(
      f"fragments={fragments} says how a tree is divided; the number of "
      f"fragments is num_fragments={fragments}"
    )
  if fragments is None or isinstance(fragments, Fragments):
    return fragments
  return fragments if callable(fragments) else tuple(map(tuple, fragments))


def _averaged_gradients(
  inner: optax.GradientTransformation, exchange: Aggregator, axis_name: str
) -> optax.GradientTransformationExtraArgs:
  inner = optax.with_extra_args_support(inner)

  def init(params: Tree) -> GradientState:
    state = GradientState(inner.init(params), exchange.init(params))
    check_outermost(state.inner)
    return state

  def update(updates, state, params=None, **extra):
    check_axis(axis_name)
    mean, exchanged = updates, state.exchange
    if has_values(mean):
      mean, exchanged = exchange.update(mean, exchanged)
    updates, kept = inner.update(mean, state.inner, params, **extra)
    return updates, GradientState(kept, exchanged)

  return optax.GradientTransformationExtraArgs(init, update)


# The letters of the papers.
_SHORT = {"H": "sync_interval", "P": "num_fragments", "tau": "overlap_steps"}
_COUNTS = ("sync_interval", "num_fragments", "overlap_steps")
_ABOUT_TRANSFORMS = """\
Returns an optax transform; see `step_transform` for the other arguments, whose
defaults are the method's. Rank and H stay as they are given here; only runs of
a config adapt them. A step's program cannot hide a transfer behind later steps:
`make_rounds` can."""


def named_step_transform(name: str) -> Callable[..., Any]:
  """The function behind `dilocox_jax.NAME`, e.g. `dilocox_jax.diloco`.

  Args:
    name: One of `plan.schedule.methods.METHODS`.
  """
  build, recipe = METHODS[name], _recipe(name)
  outer_settings = _outer_settings(name)
  settings = inspect.signature(build).parameters
  options = inspect.signature(step_transform).parameters

  def make(inner, outer=None, **given):
    for key in given:
      if key not in settings and key not in options:
        known = [*settings, *list(options)[3:]]
        near = [_SHORT.get(key), *difflib.get_close_matches(key, known)]
        hint = next((f" (did you mean {word}?)" for word in near if word), "")
        raise TypeError(
          f"{name} has no argument {key!r}{hint}; it has: {', '.join(known)}"
        )
      if key in _COUNTS and not isinstance(given[key], numbers.Integral):
        raise ValueError(f"{key}={given[key]!r} must be a whole number")
    given |= {k: operator.index(given[k]) for k in _COUNTS if k in given}
    _check_order(given)
    method = build(**{k: v for k, v in given.items() if k in settings})
    rest = {k: v for k, v in given.items() if k not in settings}
    if outer is None and method.exchanged == "pseudo_gradient":
      outer = _outer(**outer_settings)
    # Without a loss there is no error that could be fed back.
    brought = {} if rest.get("codec") == "float32" else recipe
    return step_transform(method, inner, outer, **(brought | rest))

  make.__name__ = make.__qualname__ = name
  make.__doc__ = "\n\n".join(
    [inspect.getdoc(build) or "", _about_outer(name), _ABOUT_TRANSFORMS]
  )
  make.__signature__ = _signature(settings, options, recipe)  # type: ignore
  return make


def _check_order(given: Mapping[str, Any]) -> None:
  """Raises ValueError for an order that a transform would not read."""
  order = given.get("fragment_order")
  if order is None or order in SLICED or order not in ORDERS:
    return
  raise ValueError(
    f"fragment_order={order!r} divides the layers of a stacked model, and a "
    "transform divides whole leaves of about equal bytes: leave it out, take "
    f"one of {', '.join(SLICED)}, or pass fragments="
    f"dilocox_jax.plan.schedule.fragments.Fragments(P, num_layers, {order!r})"
  )


def _signature(
  settings: Mapping[str, inspect.Parameter],
  options: Mapping[str, inspect.Parameter],
  recipe: Mapping[str, Any],
) -> inspect.Signature:
  """Joins both lists of arguments: inner, outer, then keywords."""
  own = [p.replace(kind=p.KEYWORD_ONLY) for p in settings.values()]
  inner, outer, *rest = [
    p.replace(default=recipe.get(name, p.default))
    for name, p in options.items()
    if name != "method"
  ]
  return inspect.Signature([inner, outer, *own, *rest])


def _outer_settings(name: str) -> dict[str, Any]:
  """Returns rate, momentum and power of a method's own outer optimizer."""
  values = {**DEFAULTS, **RECIPES.get(name, {})}
  prefix = "outer."
  return {
    path.removeprefix(prefix): value
    for path, value in values.items()
    if path.startswith(prefix)
  }


def _outer(
  learning_rate: float, momentum: float, average_power: float
) -> optax.GradientTransformation:
  nesterov = bool(momentum)
  optimizer = optax.sgd(learning_rate, momentum or None, nesterov)
  return averaged(optimizer, average_power) if average_power else optimizer


def _about_outer(name: str) -> str:
  """Says which outer optimizer a method brings."""
  if METHODS[name]().exchanged == "gradient":
    return "It has no outer optimizer; `outer` is not read."
  own = _outer_settings(name)
  sgd = f"optax.sgd({own['learning_rate']}"
  if own["momentum"]:
    sgd += f", momentum={own['momentum']}, nesterov=True"
  text = f"{sgd})"
  if own["average_power"]:
    text = f"dilocox_jax.averaged({text}, {own['average_power']})"
  return f"Without `outer` the outer optimizer is `{text}`."


def _recipe(name: str) -> dict[str, Any]:
  """Returns what the name of a method brings: its codec and its feedback."""
  codec: dict[str, Any] = {}
  brought: dict[str, Any] = {}
  for path, value in RECIPES.get(name, {}).items():
    section, field = path.split(".")
    if section == "codec":
      codec[field] = value
    elif section == "exchange":
      brought[field] = value
  return brought | ({"codec": codec} if codec else {})
