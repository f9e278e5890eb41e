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

from dilocox_jax.aggregators.exchange import exchange as mean_exchange
from dilocox_jax.api.argument_kinds import (
  aggregator_of,
  check_method,
  check_optimizer,
)
from dilocox_jax.checks import require
from dilocox_jax.codecs.base import (
  Codec,
)
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.config.recipes import DEFAULTS, RECIPES
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.outer.average import averaged, check_outermost
from dilocox_jax.outer.cuts import Cuts, Fragmentation
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.outer.step_state import GradientState, on_trained_leaves
from dilocox_jax.outer.step_transform import check_axis, pseudo_gradient_steps
from dilocox_jax.plan.schedule.fragments import ORDERS, SLICED, Fragments
from dilocox_jax.plan.schedule.methods import METHODS, Method
from dilocox_jax.trees import Aggregator, Tree, has_values


def step_transform(
  method: Method,
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation | None = None,
  *,
  exchange: Aggregator | str = "float32",
  axis_name: str = REPLICA_AXIS,
  fragments: Fragmentation | None = None,
  trainable: Callable[[str], bool] | None = None,
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
    exchange: What averages over replicas, e.g. `dilocox_jax.exchange(
      "int(bits=4)", feedback=1.0)`, or the name of a codec without feedback.
    axis_name: Axis over which replicas are mapped.
    fragments: How the tree is divided. A function from the path of a leaf, such
      as "layers/0/kernel", to its fragment, 0 to P - 1, or
      `plan.schedule.fragments.Fragments`, which divides stacked layers. None
      divides whole leaves such that the fragments have about equal bytes, or
      slices every leaf if the method does.
    trainable: Function of the path of a leaf that says whether it is trained.
      The others stay, have no state and are not sent.

  Returns:
    A transform whose `init` takes the parameters of one replica, a tree of
    arrays of any shapes, and whose `update(grads, state, params)` returns what
    `optax.apply_updates` adds to them. Arrays of real floats are trained;
    integers and booleans stay as they are (`outer.step_state`). Outer
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
  aggregator = aggregator_of(exchange, axis_name)
  check_unsent(method, aggregator)
  require(
    aggregator.carrier is None,
    "dilocox_jax.mailbox exchanges outside of compiled programs: give it to "
    "dilocox_jax.make_rounds",
  )
  if method.exchanged == "gradient":
    mean = _averaged_gradients(inner, aggregator, axis_name)
    return on_trained_leaves(mean, trainable)
  if outer is None:
    raise ValueError("outer=None: this method needs an outer optimizer")
  count = method.schedule.num_fragments
  if fragments is None and method.fragment_order in SLICED:
    fragments = Fragments(count, 1, method.fragment_order)
  _check_fragments(fragments)
  step = OuterStep(method, outer, aggregator, axis_name)
  steps = pseudo_gradient_steps(step, inner, Cuts(count, fragments))
  return on_trained_leaves(steps, trainable)


def check_unsent(method: Method, aggregator: Aggregator) -> None:
  """Raises ValueError if a replica cannot keep what a codec lost.

  Args:
    method: Schedule and rule.
    aggregator: What averages over replicas.
  """
  require(
    not aggregator.keep_unsent or method.can_keep_unsent,
    "keep_unsent=True needs replicas that go on from the outer parameters at "
    "once, or rule 'continue': take feedback=1.0",
  )


def _check_fragments(fragments: Fragmentation | None) -> None:
  if isinstance(fragments, int):
    raise ValueError(
      f"fragments={fragments} says how a tree is divided; the number of "
      f"fragments is num_fragments={fragments}"
    )
  require(
    fragments is None
    or callable(fragments)
    or isinstance(fragments, Fragments),
    "fragments must be a function from a leaf's path to the number of its "
    "fragment, or plan.schedule.fragments.Fragments",
  )


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
Returns an optax transform; `step_transform` has the arguments beside the
schedule's. `codec` takes the place of the method's own codec, and `exchange`
that of codec and feedback. Rank and H stay as they are given here; only runs of
a config adapt them. A step's program cannot hide a transfer behind later steps:
`make_rounds` can."""


def named_step_transform(name: str) -> Callable[..., Any]:
  """The function behind `dilocox_jax.NAME`, e.g. `dilocox_jax.diloco`.

  Args:
    name: One of `plan.schedule.methods.METHODS`.
  """
  build, own = METHODS[name], _own_settings(name)
  settings = inspect.signature(build).parameters
  options = _options(own["exchange"])

  def make(inner, outer=None, **given):
    for key in given:
      if key not in settings and key not in options:
        known = [*settings, *options]
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
      outer = _outer(**own["outer"])
    codec = rest.pop("codec", None)
    if rest.setdefault("exchange", None) is None:
      axis_name = rest.get("axis_name", REPLICA_AXIS)
      rest["exchange"] = _exchange(own["exchange"], codec, axis_name)
    else:
      require(codec is None, "codec and exchange both say what is sent")
    return step_transform(method, inner, outer, **rest)

  make.__name__ = make.__qualname__ = name
  make.__doc__ = "\n\n".join(
    [inspect.getdoc(build) or "", _about_outer(name), _ABOUT_TRANSFORMS]
  )
  make.__signature__ = _signature(settings, options)  # type: ignore
  return make


def _exchange(
  own: Mapping[str, Any], codec: Codec | str | None, axis_name: str
) -> Aggregator:
  """Builds a method's own exchange, or the one with another codec."""
  settings = dict(own) if codec is None else {**own, "codec": codec}
  if settings["codec"] in ("float32", Float()):
    # Without a loss there is no error that could be fed back.
    settings["feedback"] = 0.0
  return mean_exchange(**settings, axis_name=axis_name)


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


def _options(own: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
  """Returns the keyword arguments beside those of the schedule, by name."""
  of_transform = dict(inspect.signature(step_transform).parameters)
  exchange = of_transform["exchange"].replace(default=None)
  codec = exchange.replace(name="codec", default=own["codec"])
  rest = {k: of_transform[k] for k in ("axis_name", "fragments", "trainable")}
  return {"codec": codec, "exchange": exchange} | rest


def _signature(
  settings: Mapping[str, inspect.Parameter],
  options: Mapping[str, inspect.Parameter],
) -> inspect.Signature:
  """Joins both lists of arguments: inner, outer, then keywords."""
  own = [p.replace(kind=p.KEYWORD_ONLY) for p in settings.values()]
  of_transform = inspect.signature(step_transform).parameters
  both = [of_transform["inner"], of_transform["outer"]]
  return inspect.Signature([*both, *own, *options.values()])


def _own_settings(name: str) -> dict[str, dict[str, Any]]:
  """Returns the fields of exchange and outer optimizer that a method brings."""
  values = {**DEFAULTS, **RECIPES.get(name, {})}
  sections: dict[str, dict[str, Any]] = {"exchange": {}, "outer": {}}
  for path, value in values.items():
    section, field = path.split(".")
    sections.setdefault(section, {})[field] = value
  del sections["exchange"]["kind"]  # Only a config names one.
  return sections


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
  own = _own_settings(name)["outer"]
  sgd = f"optax.sgd({own['learning_rate']}"
  if own["momentum"]:
    sgd += f", momentum={own['momentum']}, nesterov=True"
  text = f"{sgd})"
  if own["average_power"]:
    text = f"dilocox_jax.averaged({text}, {own['average_power']})"
  return f"Without `outer` the outer optimizer is `{text}`."
