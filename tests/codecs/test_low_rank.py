from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from dilocox_jax.codecs import low_rank
from dilocox_jax.codecs.low_rank import (
  Factors,
  LocalLowRank,
  LowRank,
  grams,
  orthonormal,
)
from tests.codecs.alone import alone
from tests.oracles import codecs as oracle

SHAPE = 3, 14, 24
RANK = 4
KEY = jax.random.key(0)
EXACT = 2e-6  # fp32, relative to the norm
CODECS = {"shared": LowRank(RANK), "local": LocalLowRank(RANK)}


def program(codec):
  """(values, state, key) -> decoded values and new state of one leaf."""

  def run(values, state, key):
    [found], [state], _ = alone(codec, [values], [state], key)
    return found, state

  return jax.jit(run)


PROGRAMS = {name: program(codec) for name, codec in CODECS.items()}
both = pytest.mark.parametrize("name", PROGRAMS)


def of_rank(rank, seed=0):
  rng = np.random.default_rng(seed)
  layers, rows, columns = SHAPE
  left = rng.normal(size=(layers, rows, rank))
  right = rng.normal(size=(layers, rank, columns))
  return jnp.asarray(left @ right, jnp.float32)


def start(name) -> Any:
  return CODECS[name].init([SHAPE], KEY)[0]


def drawn(tree):
  return jax.tree.map(lambda leaf: jax.random.normal(KEY, leaf.shape), tree)


def distance(found, values):
  """Relative to the norm of the values."""
  error = np.asarray(found, np.float64) - np.asarray(values, np.float64)
  return np.linalg.norm(error) / np.linalg.norm(values)


@both
@pytest.mark.parametrize(("rank", "scale"), [(1, 1e-12), (3, 1), (RANK, 1e12)])
def test_matrices_of_a_rank_up_to_that_are_recovered(name, rank, scale):
  values = scale * of_rank(rank)
  found, _ = PROGRAMS[name](values, start(name), KEY)
  assert distance(found, values) < EXACT


@pytest.mark.parametrize("passes", [1, 3])
def test_power_iterations_are_those_of_the_plain_twin(passes):
  values = of_rank(10)
  starts = drawn(start("shared")).right
  fixed = jax.random.normal(KEY, (SHAPE[2], RANK), jnp.float32)
  for codec, first in (
    (LowRank(RANK, passes), starts),
    (LocalLowRank(RANK, passes), jnp.stack([fixed] * SHAPE[0])),
  ):
    state: Any = Factors(starts) if isinstance(codec, LowRank) else ()
    found, _ = program(codec)(values, state, KEY)
    for layer in range(SHAPE[0]):
      expected = oracle.low_rank(
        np.asarray(values[layer], np.float64),
        np.asarray(first[layer], np.float64),
        passes,
      )
      np.testing.assert_allclose(found[layer], expected, atol=6e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e25])
def test_a_warm_factor_serves_whatever_size_the_updates_have(scale):
  # The factor is as large as the update, and their product leaves fp32.
  found, state = PROGRAMS["shared"](scale * of_rank(RANK), start("shared"), KEY)
  values = (scale or 1.0) * of_rank(RANK)
  found, _ = PROGRAMS["shared"](values, state, KEY)
  assert distance(found / (scale or 1.0), of_rank(RANK)) < EXACT


def test_directions_that_were_missing_revive():
  state = start("shared")
  _, state = PROGRAMS["shared"](of_rank(1), state, KEY)
  missing = np.all(np.asarray(state.right) == 0, axis=1)
  assert missing.sum(-1).tolist() == [RANK - 1] * SHAPE[0]
  values = of_rank(RANK, seed=5)
  found, state = PROGRAMS["shared"](values, state, jax.random.key(2))
  assert distance(found, values) < EXACT
  assert not np.any(np.all(np.asarray(state.right) == 0, axis=1))


SMALLER = 10.0 ** -np.arange(0, 12, 3)


@pytest.mark.parametrize(
  ("rank", "scale"), [(1, 1e30), (3, 1e-30), (RANK, 1.0), (RANK, SMALLER)]
)
def test_a_basis_is_orthonormal_and_spans_what_there_is(rank, scale):
  columns = np.asarray(of_rank(rank))[:, :, :RANK].astype(np.float64)
  basis = np.asarray(
    orthonormal(jnp.asarray(scale * columns, jnp.float32)), np.float64
  )
  gram = np.swapaxes(basis, 1, 2) @ basis
  lengths = np.sort(np.diagonal(gram, axis1=1, axis2=2), axis=-1)
  assert lengths[:, : RANK - rank] == pytest.approx(0.0, abs=1e-12)
  assert lengths[:, RANK - rank :] == pytest.approx(1.0, abs=1e-5)
  assert np.max(np.abs(gram * (1 - np.eye(RANK)))) < 1e-5
  rest = columns - basis @ (np.swapaxes(basis, 1, 2) @ columns)
  sizes = np.linalg.norm(columns, axis=1)
  assert np.max(np.linalg.norm(rest, axis=1) / sizes) < 1e-5


@pytest.fixture(params=["looped", "unrolled"])
def gram_schmidt(request, monkeypatch):
  """The steps inside a panel in a loop, as on CPUs, and without, as on GPUs."""
  steps = getattr(low_rank, f"{request.param}_gram_schmidt")
  monkeypatch.setattr(low_rank, "looped_gram_schmidt", steps)


# Columns of 1, 2 and 3 panels. The last panel of 20 columns is not full.
@pytest.mark.parametrize("rank", [5, 16, 20])
@pytest.mark.usefixtures("gram_schmidt")
def test_a_basis_of_several_panels_is_that_of_gram_schmidt(rank):
  columns = np.random.default_rng(0).normal(size=(2, 50, rank))
  columns[1, :, 3] = 0
  columns[1, :, rank - 1] = columns[1, :, 0] - 2 * columns[1, :, 2]
  basis = orthonormal(jnp.asarray(columns, jnp.float32))
  for layer in range(2):
    kept = np.ones(rank, bool)
    kept[[3, rank - 1]] = layer == 0
    expected, triangle = np.linalg.qr(columns[layer][:, kept])
    expected = expected * np.sign(np.diag(triangle))
    assert np.all(np.asarray(basis[layer])[:, ~kept] == 0)
    np.testing.assert_allclose(basis[layer][:, kept], expected, atol=3e-6)


@pytest.mark.parametrize("remainder", [1e-2, 1e-3, 1e-4, 3e-5, 1e-7])
@pytest.mark.usefixtures("gram_schmidt")
def test_short_remainders_become_columns_and_rounding_errors_do_not(remainder):
  rng = np.random.default_rng(0)
  rank = 12
  dependent = rng.normal(size=(2, 300, 3)) @ rng.normal(size=(2, 3, rank))
  columns = dependent / np.linalg.norm(dependent, axis=1, keepdims=True)
  noise = rng.normal(size=columns.shape)
  noise /= np.linalg.norm(noise, axis=1, keepdims=True)
  columns = np.float32(columns + remainder * noise).astype(np.float64)
  found = orthonormal(jnp.asarray(columns, jnp.float32))
  basis = np.asarray(found, np.float64)
  gram = np.swapaxes(basis, 1, 2) @ basis
  kept = np.diagonal(gram, axis1=1, axis2=2) > 0
  is_real = remainder > 1e-5
  assert kept.sum(axis=1).tolist() == [rank if is_real else 3] * 2
  assert np.max(np.abs(gram - kept[:, None] * np.eye(rank))) < 3e-6
  rest = columns - basis @ (np.swapaxes(basis, 1, 2) @ columns)
  longest_rest = np.max(np.linalg.norm(rest, axis=1))
  assert longest_rest < (1e-6 if is_real else 1e-5)


def test_room_for_a_higher_rank_is_kept_as_it_was():
  codec = LowRank(2, max_rank=RANK)
  small = (1, 5, 6)
  [state, room] = drawn(codec.init([SHAPE, small], KEY))
  assert state.right.shape == (3, 24, RANK)
  _, after = program(codec)(of_rank(RANK), state, KEY)
  assert np.array_equal(after.right[..., 2:], state.right[..., 2:])
  assert not np.any(after.right[..., :2] == state.right[..., :2])
  # A leaf that is sent whole at this rank keeps the room alone.
  values = jnp.ones(small, jnp.float32)
  _, factor = program(LowRank(1, max_rank=RANK))(values, room, KEY)
  assert np.any(factor.right)
  found, room = program(LowRank(RANK, max_rank=RANK))(values, factor, KEY)
  assert np.array_equal(found, values) and not np.any(room.right)


def test_grams_have_the_spectrum_of_what_is_decoded():
  values = of_rank(10)
  found, state = PROGRAMS["shared"](values, start("shared"), KEY)
  spectrum = np.linalg.svd(np.asarray(found, np.float64), compute_uv=False)
  gram = grams({"w": state}, RANK)["w"]
  energies = np.linalg.eigvalsh(np.asarray(gram, np.float64))[:, ::-1]
  np.testing.assert_allclose(energies, spectrum[:, :RANK] ** 2, rtol=1e-4)


def products(jaxpr):
  """Every matrix product of a program, loops included."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from products(inner)


@both
def test_products_are_full_fp32_on_every_device(name):
  """In bfloat16 or TF32, rounding errors would become directions."""
  trace = jax.make_jaxpr(PROGRAMS[name])(of_rank(2), start(name), KEY)
  highest = (jax.lax.Precision.HIGHEST,) * 2
  precisions = [each.params["precision"] for each in products(trace.jaxpr)]
  assert len(precisions) >= 4
  assert set(precisions) == {highest}
