"""A schedule, a rule, an optimizer, a source and a model of one's own."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

import dilocox_jax as dx


@dataclasses.dataclass(frozen=True)
class GrowingSchedule(dx.SyncSchedule):
  """Sends all parameters at once after rounds of H, H, 2 H, 2 H, 4 H ... steps.

  Replicas differ most in the beginning, when the learning rate is high. With
  H = 2 the rounds end after the steps 2, 4, 8, 12, 20, 28 and so on.

  Attributes:
    repeats: Rounds of one length that follow each other.
  """

  repeats: int = dx.limited(2, at_least=1)

  def round_at(self, step: int) -> tuple[int, int]:
    """Returns the index and the number of inner steps of a round."""
    return next(
      (index, end - start) for index, start, end in self._rounds() if end > step
    )

  def events(self, start: int, stop: int) -> list[dx.Event]:
    """Returns a send and its apply after the last step of every round."""
    found = []
    for _, _, end in self._rounds():
      if end > stop:
        break
      if end > start:
        found += [dx.Event(end, kind, 0, end) for kind in ("apply", "send")]
    return found

  def _rounds(self) -> Iterator[tuple[int, int, int]]:
    """Yields index, steps before and steps after every round, for ever."""
    index = start = 0
    while True:
      end = start + self.sync_interval * 2 ** (index // self.repeats)
      yield index, start, end
      index = index + 1
      start = end


def growing(sync_interval: int = 4, repeats: int = 2) -> dx.Method:
  """Averages pseudo-gradients after rounds that grow longer.

  Args:
    sync_interval: H of the first rounds (inner steps).
    repeats: Rounds of one length that follow each other.
  """
  schedule = GrowingSchedule(sync_interval, repeats=repeats)  # pyright: ignore
  return dx.Method(schedule)


def halfway(method: dx.Method, axis_name: str) -> dx.ApplyRule:
  """A rule by which replicas go half of the way to the outer parameters.

  What is measured and averaged is that of `reset`.
  """
  del method, axis_name

  def rejoin(inner, old, new, own):
    del old, own
    return jax.tree.map(lambda w, b: 0.5 * w + 0.5 * b, inner, new)

  return dx.ApplyRule(rejoin=rejoin)


def clipped_momentum(
  learning_rate: float, momentum: float | None = None
) -> optax.GradientTransformation:
  """An outer optimizer that clips what it is given and lets the step decay.

  Args:
    learning_rate: Learning rate of the first exchange.
    momentum: Share of the old step that is kept; None is 0.
  """
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.trace(momentum or 0.0),
    optax.scale_by_learning_rate(
      optax.exponential_decay(learning_rate, transition_steps=1, decay_rate=0.9)
    ),
  )


def sums() -> dx.Corpus:
  """A source of sums, one a line, e.g. "3+4=7"."""
  rows = (f"{a}+{b}={a + b}" for a in range(100) for b in range(100))
  tokens = np.frombuffer("\n".join(rows).encode(), np.uint8)
  return dx.Corpus("sums", tokens[:-9000], tokens[-9000:], "5" * 16, 256, 0)


def running_mean(shape: dx.ModelShape, *, dtype=jnp.float32, **how) -> dx.Model:
  """A model in which tokens see the mean of those before them.

  Its layers can be divided among pipeline stages.
  """
  del how  # Ways to run the layers, such as `unroll`.

  def init(key):
    leaves = {}
    for path, leaf in shape.parameter_shapes.items():
      key, used = jax.random.split(key)
      leaves[path] = jax.random.normal(used, leaf) / math.sqrt(shape.model_dim)
    return traverse_util.unflatten_dict(leaves, sep="/")

  def embed(params, tokens):
    return params["embed"]["embedding"][tokens.reshape(-1)].astype(dtype)

  def block(layer, x, length):
    rows = x.reshape(-1, length, x.shape[-1])
    count = jnp.arange(1, length + 1, dtype=x.dtype)[None, :, None]
    mean = (jnp.cumsum(rows, axis=1) / count).reshape(x.shape)
    mixed = mean @ layer["mean"]["mixing"] + x @ layer["own"]["mixing"]
    return x + jnp.tanh(mixed)

  def logits(params, x):
    return (x * params["final_norm"]["scale"][None]) @ params["head"]["kernel"]

  def apply(params, tokens):
    layers = jax.tree.map(lambda leaf: leaf.astype(dtype), params["blocks"])

    def layer(x, leaves):
      return block(leaves, x, tokens.shape[1]), None

    x, _ = jax.lax.scan(layer, embed(params, tokens), layers)
    return logits(params, x).reshape(*tokens.shape, -1)

  return dx.Model(shape, init, apply, embed, block, logits)


@dataclasses.dataclass(frozen=True)
class RunningMean(dx.ModelShape):
  """Sizes of the model; heads and the MLP have no part in it."""

  builder = running_mean

  def block_shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the two matrices of a layer."""
    square = (self.model_dim, self.model_dim)
    return {"mean/mixing": square, "own/mixing": square}


def register() -> None:
  """Makes them known by their names."""
  dx.register_method(growing)
  dx.register_recipe("growing", {"outer.momentum": 0.9})
  kind = dx.RuleKind(
    halfway, lambda interval, tau: tau < interval, "be below {}"
  )
  dx.register_rule("halfway", kind)
  dx.register_optimizer("clipped_momentum", clipped_momentum)
  dx.register_source("sums", sums)
  dx.register_model("running_mean", RunningMean(2, 16, 2, 24, 256))  # pyright: ignore
