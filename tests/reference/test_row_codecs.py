"""The codecs of rows against the quantizers of JAX, and shares by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs.quantize import E3M0, Float, Int
from dilocox_jax.reference.row_codecs import E3M0Rows, FloatRows, IntRows
from dilocox_jax.reference.shares import (
  Cuts,
  Tables,
  make_share,
  norm_of_values,
  residual_cuts,
  residual_values,
)

CODECS = [
  (Float("float32"), FloatRows("float32")),
  (Float("bfloat16"), FloatRows("bfloat16")),
  (Float("float16"), FloatRows("float16")),
  (Int(bits=8), IntRows(8)),
  (Int(bits=4), IntRows(4)),
  (Int(bits=2), IntRows(2)),
  (Int(bits=1), IntRows(1)),
  (E3M0(), E3M0Rows()),
]


def drawn(num_rows, width, seed=0):
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(num_rows, width)).astype(np.float32)
  rows[0] = 0
  return rows


@pytest.mark.parametrize(("fast", "plain"), CODECS)
@pytest.mark.parametrize("width", [1, 7, 100, 128])
def test_bytes_mean_what_they_mean_in_jax(fast, plain, width):
  rows = drawn(9, width)
  arrays = [np.asarray(each) for each in fast.code(jnp.asarray(rows))]
  matrices = [
    np.ascontiguousarray(each).view(np.uint8).reshape(len(rows), -1)
    for each in arrays
  ]
  expected = np.asarray(fast.values(arrays, width))
  np.testing.assert_array_equal(plain.decode(matrices, width), expected)


@pytest.mark.parametrize(("fast", "plain"), CODECS)
def test_rows_are_encoded_as_in_jax_up_to_the_rounding_of_scales(fast, plain):
  rows = drawn(40, 96)
  decoded = plain.decode(plain.encode(rows), 96)
  arrays = fast.code(jnp.asarray(rows))
  expected = np.asarray(fast.values(arrays, 96))
  # A scale may round to the next number of bfloat16.
  np.testing.assert_allclose(decoded, expected, rtol=2**-7, atol=1e-30)


def message(values, tables):
  return [array for table in tables.encode(values) for array in table]


@pytest.mark.parametrize("num_slices", [1, 2, 3, 8, 50])
def test_slices_have_all_rows_once_and_about_equal_bytes(num_slices):
  tables = Tables(IntRows(1), widths=(64, 100))
  arrays = message([drawn(30, 64), drawn(11, 100)], tables)
  cut = Cuts.of(tables.of_arrays(arrays), num_slices)
  slices = [
    cut.slice_of(tables.of_arrays(arrays), s) for s in range(num_slices)
  ]
  joined = cut.join(slices)
  for array, again in zip(arrays, joined, strict=True):
    np.testing.assert_array_equal(array, again)
  sizes = [cut.num_bytes(s) for s in range(num_slices)]
  assert sum(sizes) == sum(array.nbytes for array in arrays)
  assert max(sizes) <= sum(sizes) / num_slices + 15 + 1


def test_a_slice_is_read_from_its_bytes():
  tables = Tables(IntRows(4), widths=(10, 6))
  whole = tables.of_arrays(message([drawn(4, 10), drawn(5, 6)], tables))
  cut = Cuts.of(whole, 3)
  for number in range(3):
    part = cut.slice_of(whole, number)
    content = b"".join(m.tobytes() for table in part for m in table)
    assert len(content) == cut.num_bytes(number)
    for table, again in zip(part, cut.slice_in(content, number), strict=True):
      for one, other in zip(table, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_share_is_the_weighted_mean():
  tables = Tables(FloatRows(), widths=(2,))
  one = [np.array([[1, 2]], np.float32)]
  other = [np.array([[5, 2]], np.float32)]
  share, residual = make_share(
    tables,
    [tables.encode(one), tables.encode(other)],
    weights=[3, 1],
    norms=[norm_of_values(one), norm_of_values(other)],
  )
  np.testing.assert_array_equal(tables.decode(share)[0], [[2, 2]])
  assert not residual


def test_the_residual_makes_up_for_the_loss_of_the_share():
  tables = Tables(IntRows(1), widths=(128,), has_residual=True)
  messages = [[drawn(8, 128, seed)] for seed in range(4)]
  encoded = [tables.encode(values) for values in messages]
  norms = [tables.norm(each) for each in encoded]
  mean = np.mean([tables.decode(each)[0] for each in encoded], axis=0)
  cut = Cuts.of(encoded[0], 1)
  residual = None
  total = np.zeros_like(mean)
  for _ in range(40):
    share, rest = make_share(tables, encoded, [1] * 4, norms, residual)
    residual = residual_values(tables, rest)
    shapes = [m.shape[1] for m in rest[0]]
    assert tuple(shapes) == residual_cuts(tables, cut).row_bytes[0]
    total += tables.decode(share)[0]
  gap = np.linalg.norm(total / 40 - mean) / np.linalg.norm(mean)
  assert gap < 0.2  # Without residuals it is 0.6.


def test_a_slice_above_its_declared_norm_is_scaled_down():
  tables = Tables(FloatRows(), widths=(2,))
  right = tables.encode([np.array([[3, 4]], np.float32)])
  wrong = tables.encode([np.array([[3000, 4000]], np.float32)])
  share, _ = make_share(tables, [right, wrong], [1, 1], norms=[5, 5])
  np.testing.assert_allclose(tables.decode(share)[0], [[3, 4]], rtol=1e-6)


def test_a_share_is_at_most_as_large_as_the_largest_message():
  tables = Tables(IntRows(4), widths=(4,), has_residual=True)
  values = tables.encode([np.array([[1, 1, 1, 1]], np.float32)])
  residual = [np.array([[9, 9, 9, 9]], np.float32)]
  norms = [tables.norm(values)] * 2
  share, _ = make_share(tables, [values, values], [1, 1], norms, residual)
  assert 0.9 * norms[0] < tables.norm(share) <= norms[0]
