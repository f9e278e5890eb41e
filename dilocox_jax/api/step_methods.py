"""The named methods as optax transforms, for anybody's training loop.

A transform runs in the code of one replica, under an axis name that the caller
binds with `jax.vmap`, `jax.shard_map` or `jax.pmap`.
"""

import inspect
import operator
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import optax
from flax.traverse_util import unflatten_dict

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.aggregators.exchange import exchange as mean_exchange
from dilocox_jax.checks import did_you_mean, require
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.config.recipes import DEFAULTS, RECIPES
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.outer.average import averaged, check_outermost
from dilocox_jax.outer.fragment_view import Fragmentation, FragmentView
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.outer.step_state import GradientState, on_trained_leaves
from dilocox_jax.outer.step_transform import check_axis, pseudo_gradient_steps
from dilocox_jax.plan.schedule.fragments import ORDERS, SLICED, Fragments
from dilocox_jax.plan.schedule.methods import METHODS, Method
from dilocox_jax.rounds.exchanges import MailboxExchange
from dilocox_jax.trees import Tree, has_values


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
  steps = pseudo_gradient_steps(step, inner, FragmentView(count, fragments))
  return on_trained_leaves(steps, trainable)


def check_kind(is_right: bool, what: str, part: Any, wanted: str) -> None:
  """Raises TypeError unless an argument is of the kind that is meant.

  Without it a wrong argument would end in an error from deep inside, such as
  "'str' object has no attribute 'init'".

  Args:
    is_right: Whether the argument is of that kind.
    what: Name of the argument.
    part: Its value.
    wanted: The kind, in words.
  """
  if not is_right:
    # A tree of arrays would fill many lines.
    shown = textwrap.shorten(repr(part), 80, placeholder=" ...")
    raise TypeError(f"{what}={shown} must be {wanted}")


def check_method(method: Any) -> None:
  """Raises TypeError for anything but a method, such as a method's name."""
  check_kind(
    isinstance(method, Method),
    *("method", method),
    "a Method: call a function of dilocox_jax.plan.schedule.methods, such as"
    " diloco(32), or one of your own; dilocox_jax.diloco is a transform",
  )


def check_optimizer(what: str, part: Any) -> None:
  """Raises TypeError unless an argument is an optax transformation."""
  is_optimizer = hasattr(part, "init") and hasattr(part, "update")
  check_kind(is_optimizer, what, part, "an optax transformation")


def check_exchange(exchange: Any) -> None:
  """Raises unless an exchange is an aggregator.

  Raises:
    ValueError: If it is `dilocox_jax.mailbox`.
    TypeError: If it is anything else.
  """
  require(
    not isinstance(exchange, MailboxExchange),
    "this cannot wait for what dilocox_jax.mailbox brings: give it to "
    "dilocox_jax.make_rounds; for dilocox_jax.train give mailbox= in its place",
  )
  check_kind(
    isinstance(exchange, Aggregator),
    *("exchange", exchange),
    "a dilocox_jax.Aggregator, such as dilocox_jax.exchange('int(bits=4)', "
    "feedback=1.0)",
  )


def aggregator_of(
  exchange: Aggregator | str, axis_name: str = REPLICA_AXIS
) -> Aggregator:
  """Returns what averages over replicas.

  Args:
    exchange: An aggregator, or a codec such as "int(bits=4)" without feedback.
    axis_name: Axis over which replicas are mapped, for a codec.

  Raises:
    TypeError: If it is no aggregator.
    ValueError: If there is no such codec.
  """
  if isinstance(exchange, str):
    return mean_exchange(exchange, axis_name=axis_name)
  check_exchange(exchange)
  return exchange


def _check_fragments(fragments: Fragmentation | None) -> None:
  require(
    isinstance(fragments, Fragments | None) or callable(fragments),
    "fragments must be a function from a leaf's path to the number of its "
    "fragment, or plan.schedule.fragments.Fragments; how many there are is "
    "num_fragments",
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
  build: Any = METHODS[name]
  own = unflatten_dict({**DEFAULTS, **RECIPES.get(name, {})}, sep=".")

  def make(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    *,
    codec: Codec | str | None = None,
    exchange: Aggregator | str | None = None,
    axis_name: str = REPLICA_AXIS,
    fragments: Fragmentation | None = None,
    trainable: Callable[[str], bool] | None = None,
    **schedule: Any,
  ) -> optax.GradientTransformationExtraArgs:
    _check_settings(name, build, schedule)
    counts = {k: operator.index(v) for k, v in schedule.items() if k in _COUNTS}
    _check_order(schedule.get("fragment_order"))
    method = build(**schedule | counts)
    if outer is None and method.exchanged == "pseudo_gradient":
      outer = _outer(**own["outer"])
    require(
      codec is None or exchange is None,
      "codec and exchange both say what is sent",
    )
    if exchange is None:
      exchange = _exchange(own["exchange"], codec, axis_name)
    return step_transform(
      method,
      inner,
      outer,
      exchange=exchange,
      axis_name=axis_name,
      fragments=fragments,
      trainable=trainable,
    )

  make.__name__ = make.__qualname__ = name
  about = _about_own(own, METHODS[name]().exchanged == "pseudo_gradient")
  make.__doc__ = f"{inspect.getdoc(build)}\n\n{about}\n\n{_ABOUT_TRANSFORMS}"
  return make


def _check_settings(
  name: str, build: Callable[..., Method], given: Mapping[str, Any]
) -> None:
  """Raises TypeError for an argument that a method's transform lacks."""
  own = list(inspect.signature(build).parameters)
  for argument in given:
    if argument in own:
      continue
    has = [*own, "codec", "exchange", "axis_name", "fragments", "trainable"]
    hint = did_you_mean(argument, has)
    end = f": {hint}" if hint.startswith("did") else ""
    raise TypeError(
      f"dilocox_jax.{name} has no argument {argument!r} (it has: "
      f"{', '.join(has)}){end}"
    )


def _exchange(
  own: Mapping[str, Any], codec: Codec | str | None, axis_name: str
) -> Aggregator:
  """Builds a method's own exchange, or the one with another codec."""
  settings = dict(own) if codec is None else {**own, "codec": codec}
  if settings["codec"] in ("float32", Float()):
    # Without a loss there is no error that could be fed back.
    settings["feedback"] = 0.0
  return mean_exchange(**settings, axis_name=axis_name)


def _check_order(order: str | None) -> None:
  """Raises ValueError for an order that a transform would not read."""
  require(
    order is None or order in SLICED or order not in ORDERS,
    f"fragment_order={order!r} divides the layers of a stacked model, and a "
    "transform divides whole leaves of about equal bytes: leave it out, take "
    f"one of {', '.join(SLICED)}, or pass fragments="
    f"dilocox_jax.plan.schedule.fragments.Fragments(P, num_layers, {order!r})",
  )


def _outer(
  learning_rate: float, momentum: float, average_power: float
) -> optax.GradientTransformation:
  nesterov = bool(momentum)
  optimizer = optax.sgd(learning_rate, momentum or None, nesterov)
  return averaged(optimizer, average_power) if average_power else optimizer


def _about_own(own: dict[str, dict[str, Any]], has_outer: bool) -> str:
  """Says which codec and which outer optimizer a method brings."""
  codec = f"Without `codec` it sends {own['exchange']['codec']!r}."
  if not has_outer:
    return f"{codec} It has no outer optimizer; `outer` is not read."
  outer = own["outer"]
  text = f"optax.sgd({outer['learning_rate']}"
  if outer["momentum"]:
    text += f", momentum={outer['momentum']}, nesterov=True"
  text += ")"
  if outer["average_power"]:
    text = f"dilocox_jax.averaged({text}, {outer['average_power']})"
  return f"{codec} Without `outer` the outer optimizer is `{text}`."
