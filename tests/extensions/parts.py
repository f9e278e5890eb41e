"""A rule, an optimizer, a data source and a model from outside the package."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dilocox_jax as dx


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
    params: dict[str, Any] = {}
    for path, leaf in dx.parameter_shapes(shape).items():
      key, used = jax.random.split(key)
      values = jax.random.normal(used, leaf) / math.sqrt(shape.model_dim)
      *above, name = path.split("/")
      part = params
      for folder in above:
        part = part.setdefault(folder, {})
      part[name] = values
    return params

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
    def layer(x, leaves):
      return block(leaves, x, tokens.shape[1]), None

    x, _ = jax.lax.scan(layer, embed(params, tokens), params["blocks"])
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
  """Makes the four known by their names."""
  kind = dx.RuleKind(
    halfway, lambda interval, tau: tau < interval, "be below {}"
  )
  dx.register_rule("halfway", kind)
  dx.register_optimizer("clipped_momentum", clipped_momentum)
  dx.register_source("sums", sums)
  dx.register_model("running_mean", RunningMean(2, 16, 2, 24, 256))
