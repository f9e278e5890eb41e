"""Builds methods as optax transforms, for a user's own training loop.

A transform is code for one replica. The caller maps it over the replicas with
`jax.vmap`, `jax.shard_map` or `jax.pmap`, under an axis name that the transform
uses for its collectives.
"""

import inspect
import operator
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import optax

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.aggregators.exchange import exchange as mean_exchange
from dilocox_jax.checks import did_you_mean, require, unflat
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
  """Builds the optax transform of a method, for one of several replicas.

  The replicas exchange inside `update`. The transform must be the last one of a
  chain, and every replica must call it in every step: a transform that may skip
  a step, such as `optax.apply_if_finite`, belongs into `inner`. Steps wait for
  transfers; `make_rounds` can hide transfers behind later steps.

  Args:
    method: When replicas exchange, and how they go on with a mean, e.g.
      `plan.schedule.methods.diloco(32)`.
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters. Its gradient is the averaged
      pseudo-gradient of one fragment. Methods that average gradients do not
      read it. All other methods need it.
    exchange: Aggregator that averages over replicas, e.g.
      `dilocox_jax.exchange("int(bits=4)", feedback=1.0)`; or the name of a
      codec, which is then used without error feedback.
    axis_name: Name of the axis over which replicas are mapped.
    fragments: How the parameters are divided into P fragments: a function from
      the path of a leaf, such as "layers/0/kernel", to the number of its
      fragment, 0 to P - 1; or a `plan.schedule.fragments.Fragments`, which
      divides stacked layers. None: whole leaves in fragments of about equal
      bytes, or slices of every leaf if the method's fragments are slices.
      Methods that average gradients need None.
    trainable: Function from the path of a leaf to whether the leaf is trained.
      Other leaves do not change, have no state and are not sent. None: all
      leaves are trained.

  Returns:
    A transform. `init` takes the parameters of one replica, a tree of arrays.
    `update(grads, state, params)` returns the updates for
    `optax.apply_updates`, and the new state. Leaves of integers or booleans do
    not change. Outer parameters, and pseudo-gradients whose mean is not applied
    yet, have the dtypes of the parameters.

  Raises:
    TypeError: If `method` is not a method, `inner` or `outer` is not an
      optimizer, `exchange` is neither an aggregator nor a name, or `trainable`
      is not a function.
    ValueError: If an argument is wrong. The message is one line that names it.
  """
  check_method(method)
  check_optimizer("inner", inner)
  check_kind(
    trainable is None or callable(trainable),
    "trainable",
    trainable,
    "a function from the path of a leaf to whether it is trained",
  )
  if outer is not None:
    check_optimizer("outer", outer)
  aggregator = aggregator_of(exchange, axis_name)
  if method.exchanged == "gradient":
    require(
      fragments is None,
      "fragments would be ignored: a method that averages gradients sends them "
      "all at once",
    )
    mean = _averaged_gradients(inner, aggregator, axis_name)
    return on_trained_leaves(mean, trainable)
  if outer is None:
    raise ValueError("outer=None: this method needs an outer optimizer")
  num_fragments = method.schedule.num_fragments
  if fragments is None and method.fragment_order in SLICED:
    fragments = Fragments(num_fragments, 1, method.fragment_order)
  _check_fragments(fragments)
  outer_step = OuterStep(method, outer, aggregator, axis_name)
  view = FragmentView(num_fragments, fragments)
  steps = pseudo_gradient_steps(outer_step, inner, view)
  return on_trained_leaves(steps, trainable)


def check_kind(
  is_right: bool, argument: str, value: Any, expected: str
) -> None:
  """Raises TypeError "ARGUMENT=VALUE must be EXPECTED" unless `is_right`.

  A long value is shortened.
  """
  if not is_right:
    # The text of a tree of arrays would fill many lines.
    shown_value = textwrap.shorten(repr(value), 80, placeholder=" ...")
    raise TypeError(f"{argument}={shown_value} must be {expected}")


def check_method(method: Any) -> None:
  """Raises TypeError unless an argument `method` is a `Method`.

  The name "diloco" and the function `dilocox_jax.diloco` are no `Method`.
  """
  check_kind(
    is_right=isinstance(method, Method),
    argument="method",
    value=method,
    expected="a Method: call a function of dilocox_jax.plan.schedule.methods, "
    "such as diloco(32), or one of your own; dilocox_jax.diloco is a transform",
  )


def check_optimizer(argument: str, value: Any) -> None:
  """Raises TypeError unless a value has `init` and `update`, as optax's have.

  `argument` is the name of the value in the message.
  """
  check_kind(
    is_right=hasattr(value, "init") and hasattr(value, "update"),
    argument=argument,
    value=value,
    expected="an optax transformation",
  )


def check_exchange(exchange: Any) -> None:
  """Checks that an argument `exchange` is an aggregator.

  Raises:
    ValueError: If it is a mailbox (`dilocox_jax.mailbox`). The message names
      the functions that can use one.
    TypeError: If it is neither a mailbox nor an aggregator.
  """
  require(
    not isinstance(exchange, MailboxExchange),
    "this cannot wait for what dilocox_jax.mailbox brings: give it to "
    "dilocox_jax.make_rounds; for dilocox_jax.train give mailbox= in its place",
  )
  check_kind(
    is_right=isinstance(exchange, Aggregator),
    argument="exchange",
    value=exchange,
    expected="a dilocox_jax.Aggregator, such as "
    "dilocox_jax.exchange('int(bits=4)', feedback=1.0)",
  )


def aggregator_of(
  exchange: Aggregator | str, axis_name: str = REPLICA_AXIS
) -> Aggregator:
  """Returns the aggregator that an argument `exchange` means.

  Args:
    exchange: An aggregator, which is returned unchanged; or the name of a
      codec, such as "int(bits=4)", which is used without error feedback.
    axis_name: Name of the axis over which replicas are mapped; only read if
      `exchange` is a name.

  Raises:
    TypeError: If `exchange` is neither an aggregator, a mailbox nor a string.
    ValueError: If it is a mailbox, or if there is no such codec.
  """
  if isinstance(exchange, str):
    return mean_exchange(exchange, axis_name=axis_name)
  check_exchange(exchange)
  return exchange


def _check_fragments(fragments: Fragmentation | None) -> None:
  """Refuses `fragments` unless it is None, a function or a `Fragments`."""
  require(
    isinstance(fragments, Fragments | None) or callable(fragments),
    "fragments must be a function from a leaf's path to the number of its "
    "fragment, or plan.schedule.fragments.Fragments; how many there are is "
    "num_fragments",
  )


def _averaged_gradients(
  inner: optax.GradientTransformation, aggregator: Aggregator, axis_name: str
) -> optax.GradientTransformationExtraArgs:
  """Builds the transform of a method that averages gradients.

  `inner` gets the averaged gradients.
  """
  inner = optax.with_extra_args_support(inner)

  def init(params: Tree) -> GradientState:
    state = GradientState(inner.init(params), aggregator.init(params))
    # This raises an error if `inner` keeps an average of the parameters where
    # it would not be found.
    check_outermost(state.inner)
    return state

  def update(
    updates: Tree, state: Any, params: Tree = None, **extra: Any
  ) -> tuple[Tree, GradientState]:
    check_axis(axis_name)
    exchange_state = state.exchange
    # There is nothing to send if the tree has no values.
    if has_values(updates):
      updates, exchange_state = aggregator.update(updates, exchange_state)
    updates, inner_state = inner.update(updates, state.inner, params, **extra)
    return updates, GradientState(inner_state, exchange_state)

  return optax.GradientTransformationExtraArgs(init, update)


# Arguments of a method that are whole numbers.
_COUNTS = (
  "sync_interval",
  "num_fragments",
  "overlap_steps",
  "first_interval",
  "steps_per_doubling",
)
_DOC_WIDTH = 76  # Columns of a docstring without its indentation.
_DOC_OF_TRANSFORMS = """\
The rank of a low-rank codec and H stay the same during training; only runs
with a config can adapt them. A transform cannot hide transfers behind later
steps; the rounds of `make_rounds` can."""
_DOC_OF_INNER = "inner: Optimizer of the inner steps."
_DOC_OF_OTHERS = """\
exchange: Aggregator that averages over replicas. None: it is built from the
  codec and the error feedback of the method's recipe.
axis_name: Name of the axis over which replicas are mapped.
fragments: How the parameters are divided into fragments: a function from
  the path of a leaf to the number of its fragment, or a
  `plan.schedule.fragments.Fragments`. None: whole leaves are divided into
  fragments of about equal bytes, or every leaf is sliced if the method's
  fragments are slices.
trainable: Function from the path of a leaf to whether the leaf is trained.
  None: all leaves are trained."""
_DOC_OF_RESULT = """\
Returns:
  An optax transform for one replica (`step_transform` says how to use it).

Raises:
  TypeError: If an argument does not exist or has a wrong type.
  ValueError: If a value is wrong. The message is one line."""


def named_step_transform(name: str) -> Callable[..., Any]:
  """Builds the function `dilocox_jax.NAME`, e.g. `dilocox_jax.diloco`.

  Args:
    name: Name of a method in `plan.schedule.methods.METHODS`.

  Returns:
    A function that returns an optax transform of the method, with the defaults
    of the method's recipe. The returned function has the method's docstring,
    but with a list of its own arguments. It raises TypeError for an unknown
    argument or a wrong type, and ValueError for a wrong value.
  """
  build: Any = METHODS[name]
  recipe = unflat({**DEFAULTS, **RECIPES.get(name, {})})

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
    for argument in _COUNTS:
      # None leaves the choice to the method.
      if schedule.get(argument) is not None:
        schedule[argument] = _count(argument, schedule[argument])
    _check_order(schedule.get("fragment_order"))
    method = build(**schedule)
    if outer is None and method.exchanged == "pseudo_gradient":
      outer = _outer_optimizer(**recipe["outer"])
    require(
      codec is None or exchange is None,
      "codec and exchange both say what is sent",
    )
    if exchange is None:
      exchange = _exchange(recipe["exchange"], codec, axis_name)
    return step_transform(
      method,
      inner,
      outer,
      exchange=exchange,
      axis_name=axis_name,
      fragments=fragments,
      trainable=trainable,
    )

  make.__name__ = name
  make.__qualname__ = name
  vars(make)["__signature__"] = _signature(make, build)
  make.__doc__ = _docstring(build, recipe)
  return make


def _signature(
  make: Callable[..., Any], build: Callable[..., Method]
) -> inspect.Signature:
  """Returns the signature of a named transform, for `help` and editors.

  The arguments of `build`, e.g. `sync_interval`, take the place of
  `**schedule`.
  """
  signature = inspect.signature(make)
  # The last parameter of `make` is `**schedule`.
  *arguments, _ = signature.parameters.values()
  positional = [
    argument
    for argument in arguments
    if argument.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
  ]
  by_name = arguments[len(positional) :]
  schedule = [
    argument.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for argument in inspect.signature(build).parameters.values()
  ]
  return signature.replace(parameters=[*positional, *schedule, *by_name])


def _check_settings(
  name: str, build: Callable[..., Method], settings: Mapping[str, Any]
) -> None:
  """Raises TypeError for a setting that the named transform does not have."""
  method_arguments = list(inspect.signature(build).parameters)
  arguments = [
    *method_arguments,
    "codec",
    "exchange",
    "axis_name",
    "fragments",
    "trainable",
  ]
  for argument in settings:
    if argument in method_arguments:
      continue
    hint = did_you_mean(argument, arguments)
    # Without a similar name the hint lists all names, as this message does.
    suggestion = f": {hint}" if hint.startswith("did") else ""
    raise TypeError(
      f"dilocox_jax.{name} has no argument {argument!r} (it has: "
      f"{', '.join(arguments)}){suggestion}"
    )


def _exchange(
  recipe: Mapping[str, Any], codec: Codec | str | None, axis_name: str
) -> Aggregator:
  """Builds the aggregator of a recipe; `codec` takes the place of its codec.

  With None, the recipe's codec stays. Float32 has no error feedback.
  """
  settings = dict(recipe)
  if codec is not None:
    settings["codec"] = codec
  if settings["codec"] in ("float32", Float()):
    # A codec without loss leaves no error that could be fed back.
    settings["feedback"] = 0.0
  return mean_exchange(**settings, axis_name=axis_name)


def _count(argument: str, value: Any) -> int:
  """Returns a whole number as an int; raises TypeError for other values."""
  check_kind(hasattr(value, "__index__"), argument, value, "a whole number")
  return operator.index(value)


def _check_order(order: str | None) -> None:
  """Refuses the fragment orders "sequential" and "strided".

  Both divide stacked layers into groups, but a transform divides whole leaves.
  An unknown order is left to `Method`, which refuses it.
  """
  require(
    order is None or order in SLICED or order not in ORDERS,
    f"fragment_order={order!r} divides the layers of a stacked model, and a "
    "transform divides whole leaves of about equal bytes: leave it out, take "
    f"one of {', '.join(SLICED)}, or pass fragments="
    f"dilocox_jax.plan.schedule.fragments.Fragments(P, num_layers, {order!r})",
  )


def _outer_optimizer(
  learning_rate: float, momentum: float, average_power: float
) -> optax.GradientTransformation:
  """Builds the outer optimizer of a recipe: SGD.

  A `momentum` above 0 is Nesterov's. `average_power` is the power of a running
  mean of the outer parameters (`dilocox_jax.averaged`); 0 means no mean.
  """
  optimizer = optax.sgd(
    learning_rate, momentum=momentum or None, nesterov=bool(momentum)
  )
  if not average_power:
    return optimizer
  return averaged(optimizer, average_power)


def _docstring(
  build: Callable[..., Method], recipe: dict[str, dict[str, Any]]
) -> str:
  """Returns the method's docstring with the arguments of the transform.

  `recipe` has the sections of the method's recipe, by name.
  """
  docstring = inspect.cleandoc(build.__doc__ or "")
  text, _, sections = docstring.partition("Args:\n")
  # The method's own arguments, e.g. `sync_interval`. An empty line ends them.
  schedule = sections.partition("\n\n")[0]
  arguments = [
    _DOC_OF_INNER,
    _filled(f"outer: {_about_outer(build(), recipe['outer'])}"),
    textwrap.dedent(schedule),
    _filled(
      "codec: Codec or name of a codec. None: "
      f"{recipe['exchange']['codec']!r}, as in the recipe of the method."
    ),
    _DOC_OF_OTHERS,
  ]
  listed = textwrap.indent("\n".join(filter(None, arguments)), "  ")
  return "\n\n".join(
    [text.strip(), _DOC_OF_TRANSFORMS, f"Args:\n{listed}", _DOC_OF_RESULT]
  )


def _filled(text: str) -> str:
  """Wraps the description of an argument to the width of a docstring."""
  return textwrap.fill(
    text,
    width=_DOC_WIDTH - 2,
    subsequent_indent="  ",
    break_long_words=False,
    break_on_hyphens=False,
  )


def _about_outer(method: Method, recipe: dict[str, Any]) -> str:
  """Describes the argument `outer` of a named transform, with its default."""
  if method.exchanged != "pseudo_gradient":
    return "Not read, because this method has no outer optimizer."
  optimizer = f"optax.sgd({recipe['learning_rate']}"
  if recipe["momentum"]:
    optimizer += f", momentum={recipe['momentum']}, nesterov=True"
  optimizer += ")"
  if recipe["average_power"]:
    optimizer = f"dilocox_jax.averaged({optimizer}, {recipe['average_power']})"
  return f"Optimizer of the outer parameters. None: `{optimizer}`."
