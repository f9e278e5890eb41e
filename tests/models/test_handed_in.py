"""Modules that a user wrote in Flax, through the front door."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import dilocox_jax as dx
from dilocox_jax.models.handed_in import as_loss_model
from tests import runs

VOCAB_SIZE, WIDTH, DEPTH = 11, 8, 12  # More layers than digits.


class InNnx(nnx.Module):
  def __init__(self, rngs, depth=DEPTH):
    self.embed = nnx.Embed(VOCAB_SIZE, WIDTH, rngs=rngs)
    self.layers = nnx.List(
      [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(depth)]
    )
    self.head = nnx.Linear(WIDTH, VOCAB_SIZE, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens)
    for layer in self.layers:
      x = x + nnx.tanh(layer(x))
    return self.head(x)


class InLinen(linen.Module):
  depth: int = DEPTH

  @linen.compact
  def __call__(self, tokens):
    x = linen.Embed(VOCAB_SIZE, WIDTH)(tokens)
    for _ in range(self.depth):
      x = x + jnp.tanh(linen.Dense(WIDTH)(x))
    return linen.Dense(VOCAB_SIZE)(x)


MODULES = {
  "nnx": lambda rngs: InNnx(rngs, depth=2),
  "linen": InLinen(depth=2),
}
TOKENS = jnp.arange(20, dtype=np.int32).reshape(2, 10) % VOCAB_SIZE


def counting():
  """Tokens that count: 0, 1, ..., 10, 0, 1, ..."""
  tokens = (np.arange(20_000) % VOCAB_SIZE).astype(np.uint8)
  return dx.Corpus("counting", tokens, tokens[:2000], "0" * 16, VOCAB_SIZE, 0)


@pytest.mark.parametrize(
  "kind", ["nnx", pytest.param("linen", marks=pytest.mark.slow)]
)
def test_a_module_is_trained_in_fragments_with_a_codec_and_read_back(
  kind, tmp_path
):
  config = runs.settings(
    total_steps=48,
    method="delayed",
    num_fragments=3,
    overlap_steps=1,
    fragment_order="sliced",
    exchange={"codec": "int(bits=4)"},
  )
  parts = {"model": MODULES[kind], "inner_optimizer": optax.sgd(0.5)}
  run = dx.train(config=config, workdir=tmp_path, data=counting(), **parts)
  first, *_, last = run.metrics.evaluations
  assert last.outer_loss < 0.3 < first.outer_loss
  assert (tmp_path / "report.md").exists()
  again = dx.load(tmp_path, **parts)
  runs.assert_same_bits(again.params, run.params)


def nnx_logits(params):
  module = InNnx(nnx.Rngs(0))
  # Another value in every leaf, so that no two layers may change places.
  state = nnx.state(module, nnx.Param)
  for path, leaf in nnx.to_flat_state(state):
    ours = params
    for key in path:
      ours = ours[str(key)]
    leaf.set_value(ours)
  nnx.update(module, state)
  return module(TOKENS[:, :-1])


def linen_logits(params) -> Any:
  return InLinen().apply({"params": params}, TOKENS[:, :-1])


@pytest.mark.parametrize(
  ("module", "logits"), [(InNnx, nnx_logits), (InLinen(), linen_logits)]
)
def test_the_loss_of_a_module_is_its_cross_entropy(module, logits):
  model = as_loss_model(module)
  params, same, other = (model.init(jax.random.key(n)) for n in (0, 0, 1))
  expected = optax.softmax_cross_entropy_with_integer_labels(
    logits(params), TOKENS[:, 1:]
  ).mean()
  np.testing.assert_allclose(model.loss(params, TOKENS), expected, rtol=1e-6)
  runs.assert_same_bits(params, same)
  with pytest.raises(AssertionError):
    runs.assert_same_bits(params, other)


class WithState(nnx.Module):
  def __init__(self, rngs):
    self.drop = nnx.Dropout(0.1, rngs=rngs)


class WithMeans(linen.Module):
  @linen.compact
  def __call__(self, tokens):
    x = linen.Embed(VOCAB_SIZE, WIDTH)(tokens)
    return linen.BatchNorm(use_running_average=False)(x)


@pytest.mark.parametrize("module", [WithState, WithMeans()])
def test_state_that_is_no_parameter_is_refused(module):
  with pytest.raises(ValueError, match="state that is no parameter") as error:
    as_loss_model(module)
  assert "\n" not in str(error.value)


def test_a_model_that_is_cut_needs_the_functions_of_its_cuts(tmp_path):
  config = runs.settings(
    layout="mesh", mesh={"num_stages": 2}, inner={"accumulate_steps": 2}
  )
  with pytest.raises(ValueError, match="embed, block and logits") as error:
    dx.train(InNnx, counting(), config=config, workdir=tmp_path)
  assert "\n" not in str(error.value)
