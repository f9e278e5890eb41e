"""How many tokens a model knows, read in its program."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from dilocox_jax.models.custom import as_loss_model, reads_tokens
from dilocox_jax.models.token_limits import TokenLimits, token_limits

WIDTH = 8
ROWS = 10
LOGITS = 16


class OfNnx(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(ROWS, WIDTH, rngs=rngs)
    self.head = nnx.Linear(WIDTH, LOGITS, rngs=rngs)

  def __call__(self, tokens):
    return self.head(self.embed(tokens))


class OfLinen(linen.Module):
  @linen.compact
  def __call__(self, tokens):
    embed = linen.remat(linen.Embed)(ROWS, WIDTH)
    return linen.Dense(LOGITS)(embed(tokens))


def limits(logits, params=None):
  params = jnp.ones((ROWS, WIDTH)) if params is None else params
  return token_limits(logits, params, (2, 5))


@pytest.mark.parametrize("module", [OfNnx, OfLinen()], ids=["nnx", "linen"])
def test_a_module_knows_as_many_as_its_embedding_has_rows(module):
  model = as_loss_model(module)
  params = jax.eval_shape(model.init, jax.random.key(0))
  assert model.logits is not None
  found = token_limits(model.logits, params, (2, 5))
  assert found == TokenLimits(LOGITS, ROWS)


def with_positions(table, tokens):
  positions = jnp.arange(tokens.shape[1])
  return table[tokens] + table[:7][positions][None]


def of_one_sequence(table, tokens):
  return jax.vmap(lambda sequence: table[sequence])(tokens)


@jax.checkpoint
def clipped(table, tokens):
  return jnp.take(table, tokens, axis=0, mode="clip")


def scanned(table, tokens):
  _, rows = jax.lax.scan(
    lambda carry, column: (carry, table[column]), 0, tokens.T
  )
  return rows.swapaxes(0, 1)


@pytest.mark.parametrize(
  "logits",
  [with_positions, of_one_sequence, clipped, scanned, jax.jit(with_positions)],
)
def test_a_lookup_is_found_wherever_it_is(logits):
  assert limits(logits) == TokenLimits(WIDTH, ROWS)


def of_one_hot(table, tokens):
  return jax.nn.one_hot(tokens, ROWS) @ table


def replaced(table, tokens):
  return table[jnp.where(tokens < ROWS, tokens, 0)]


def lowered(table, tokens):
  return table[tokens - 1]


def wrapped(table, tokens):
  return table[tokens % ROWS]


@pytest.mark.parametrize("logits", [of_one_hot, replaced, lowered, wrapped])
def test_a_model_that_changes_ids_has_no_table_of_them(logits):
  assert limits(logits) == TokenLimits(WIDTH, None)


@pytest.mark.parametrize(
  ("logits", "message"),
  [
    (
      lambda table, tokens: table[tokens].mean(1),
      r"returns \[2, 8\] for token",
    ),
    (lambda table, tokens: (table[tokens], 1.0), "returns tuple for tokens"),
    (lambda table, tokens: table[tokens[:, 1:]], r"returns \[2, 4, 8\] for"),
  ],
)
def test_what_is_no_logits_is_one_line(logits, message):
  with pytest.raises(ValueError, match=f"^the model {message}"):
    limits(logits)


def test_a_loss_of_ones_own_says_nothing_of_tokens():
  def loss(model, batch):
    return model(batch).mean()

  assert as_loss_model(OfNnx, loss).logits is None
  assert reads_tokens(OfNnx, None) and reads_tokens(None, None)
  pair = (lambda key: (), loss)
  assert not reads_tokens(OfNnx, loss) and not reads_tokens(pair, None)
  assert not reads_tokens(as_loss_model(pair), None)
