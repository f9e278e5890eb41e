"""Types of arrays, names and checks of a tree's leaves, and the aggregator.

Dimension letters in all modules: B batch, L length, D model, N heads,
K head width, F feed-forward, V vocabulary, S stages, M replicas, R rank.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jaxtyping import Array, Bool, Float, Int

from dilocox_jax.checks import require

Tree = Any  # A pytree of arrays.
Scalar = Float[Array, ""]
Index = Int[Array, ""]
Boolean = Bool[Array, ""]

# Under which key a variable of Flax NNX holds its array.
_IN_VARIABLE = jax.tree_util.GetAttrKey("value")


def path_name(path: Any) -> str:
  """Returns a leaf's key path as text, e.g. "blocks/attention/query/kernel".

  A Flax NNX variable has the name of its array, with or without its box:
  `nnx.Optimizer` calls `init` with variables and `update` with their arrays.

  Args:
    path: Key path of a leaf, from `jax.tree_util`.
  """
  if path and path[-1] == _IN_VARIABLE:
    path = path[:-1]
  return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_path(tree: Tree) -> dict[str, Any]:
  """Returns the leaves of a tree by `path_name`, in the order of flattening."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {path_name(path): leaf for path, leaf in leaves}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Returns leaves by path as a nested dict, which `leaves_by_path` undoes.

  Args:
    leaves: Leaves by path; numbers of lists become text.
  """
  return traverse_util.unflatten_dict(leaves, sep="/")


def shapes_by_path(tree: Tree) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a tree's leaves by `path_name`, in the same order."""
  return {path: leaf.shape for path, leaf in leaves_by_path(tree).items()}


def kinds_by_path(tree: Tree) -> dict[str, str]:
  """Returns dtype and shape of each leaf by its path, e.g. "int32[8, 16]"."""
  kinds = {p: jax.typeof(leaf) for p, leaf in leaves_by_path(tree).items()}
  return {p: f"{kind.dtype}{list(kind.shape)}" for p, kind in kinds.items()}


def tree_digest(trees: Iterable[Tree], name: str) -> str:
  """Returns 16 hex digits that name trees of arrays.

  Args:
    trees: The trees, in order.
    name: What else the digest depends on.
  """
  whole = hashlib.sha256(name.encode())
  for leaf in jax.tree.leaves(list(trees)):
    whole.update(f"{leaf.dtype}{leaf.shape}".encode())
    whole.update(np.ascontiguousarray(leaf).tobytes())
  return whole.hexdigest()[:16]


def check_trainable(params: Tree, may_differ: bool = False) -> None:
  """Raises ValueError for the first leaf that cannot be trained.

  Only real floats can: they have a gradient, and codecs round them.

  Args:
    params: Parameters.
    may_differ: Whether integers and booleans are accepted beside them.
  """
  for path, leaf in leaves_by_path(params).items():
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    what = f"leaf {path!r}" if path else "a single leaf"
    require(
      _is_a(leaf, jnp.floating) or (may_differ and is_count(leaf)),
      f"{what} of type {kind} cannot be trained, only arrays of real "
      "floats can: keep it out of the parameters (e.g. with optax.partition, "
      "which gives it an optimizer of its own)",
    )


def has_values(tree: Tree) -> bool:
  """Whether a tree has a leaf that is not of zero size."""
  return any(leaf.size for leaf in jax.tree.leaves(tree))


def is_count(leaf: Any) -> bool:
  """Whether an array has integers or booleans, which have no gradient."""
  return _is_a(leaf, jnp.integer) or _is_a(leaf, jnp.bool_)


def _is_a(leaf: Any, kind: Any) -> bool:
  return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, kind)


def is_masked(node: Any) -> bool:
  """Whether a node stands for a leaf that is not in this tree."""
  return isinstance(node, optax.MaskedNode)


def all_finite(tree: Tree) -> Boolean:
  """Returns whether all values of a tree's floating leaves are finite."""
  finite = [
    jnp.all(jnp.isfinite(leaf))
    for leaf in jax.tree.leaves(tree)
    if jnp.isdtype(leaf.dtype, "real floating")
  ]
  return jnp.stack(finite).all()


def widened(values: Tree) -> Tree:
  """Returns values in fp32, or in their own type if that is wider."""
  return jax.tree.map(
    lambda leaf: leaf.astype(np.promote_types(np.float32, leaf.dtype)), values
  )


def shardings_of(tree: Tree) -> Tree:
  """Returns where every leaf lies, in the place of the leaf."""
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


# A computation that yields a tree and goes on with the one that it is sent,
# which has the same values.
Pausing = Generator[Tree, Tree, Any]


def without_pauses(pausing: Callable[..., Pausing]) -> Callable[..., Any]:
  """Returns a function that runs a generator to its end and returns its value.

  The function has the generator's function as its attribute `pausing`.

  Args:
    pausing: Function that returns the generator.
  """

  def run(*args, **options):
    generator = pausing(*args, **options)
    try:
      tree = next(generator)
      while True:
        tree = generator.send(tree)
    except StopIteration as stop:
      return stop.value

  run.pausing = pausing  # pyright: ignore[reportFunctionMemberAccess]
  return run


class Aggregator(NamedTuple):
  """Averages a tree over the replica axis.

  Like an optax transformation it is a pair of functions, written for one
  replica that sends to the others. Mapped over M replicas it takes leaves
  [M, ...] to leaves [...].

  A replica that is away sends NaN, and one that has diverged sends values that
  are not finite. The mean must be that of the others, and what they keep for
  the next exchange must be finite.

  Attributes:
    init: Function from the parameters of one fragment to the state.
    average: Function from one replica's values, the state and the parameters
      that the values belong to, to three things: the mean, which is the same on
      all replicas, the share of the values that was sent, and the new state.
      The parameters are the outer ones of a pseudo-gradient; few aggregators
      read them. If it was made by
      `without_pauses`, inner steps can be put between its messages: in every
      turn its generator yields what it is about to send, sends what it gets
      back, yields what has arrived, and goes on with what it gets back.
    axes: Tree prefix of the state, e.g. a dict of axes for a dict: 0 where each
      replica has its own (the default), None where all replicas have the same.
      The mean may depend on the latter alone.
    observe: Function from the state to arrays to record, by name, with the
      exchange in `metrics.jsonl`. Those of three dimensions are taken for
      Gram matrices of an update, of which the rank alone is recorded.
    stretch_ends: Function from the parameters of a fragment to the shares of
      inner steps that hide each of these turns
      (`plan.collective.stretch_ends`). None: all steps hide the first turn, and
      the steps that follow wait for the others.
    keep_unsent: Whether a replica keeps the part of its progress that was not
      sent. If true, this part stays in the replica's parameters, and the next
      pseudo-gradient contains it. If false, this part is lost, unless error
      feedback holds it as a residual.
    is_screened: Whether a share of zeros says that the replica was left out
      for its values (`aggregators.screen`), of which it keeps nothing then.
    carrier: What carries the messages where the host does so, outside of
      compiled programs (`meeting.carrier`). None: collectives.
  """

  init: Callable[[Tree], Tree]
  average: Callable[[Tree, Tree, Tree], tuple[Tree, Tree, Tree]]
  axes: Any = 0
  observe: Callable[[Tree], dict[str, Array]] = lambda state: {}
  stretch_ends: Callable[[Tree], tuple[int, ...]] | None = None
  keep_unsent: bool = False
  is_screened: bool = False
  carrier: Any = None

  @property
  def has_turns(self) -> bool:
    """Whether `average` is known to pause."""
    return hasattr(self.average, "pausing")

  def paused(self, values: Tree, state: Tree, params: Tree) -> Pausing:
    """Runs `average` with its pauses; without any it is all one turn.

    Args:
      values: Values of this replica, as for `average`.
      state: State of the exchange before.
      params: Parameters that the values belong to.
    """
    if self.has_turns:
      pausing: Any = getattr(self.average, "pausing")  # noqa: B009
      return (yield from pausing(values, state, params))
    values = yield values
    return (yield self.average(values, state, params))

  def update(
    self, values: Tree, state: Tree, params: Tree = None
  ) -> tuple[Tree, Tree]:
    """Returns the mean and the new state.

    Args:
      values: Values of this replica, as for `average`.
      state: State of the exchange before.
      params: Parameters that the values belong to; few aggregators read them.
    """
    mean, _, state = self.average(values, state, params)
    return mean, state
