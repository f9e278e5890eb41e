import ml_dtypes
import numpy as np
import pytest

from dilocox_jax.meeting.packing import (
  Content,
  arrays_in,
  layout_of,
  packed,
  raw_bytes,
  unpacked,
)
from dilocox_jax.meeting.seal import TAG_BYTES

ARRAYS = [
  np.arange(6, dtype=np.float32).reshape(2, 3),
  np.array([1, 255], np.uint8),
  np.array([0.5], ml_dtypes.bfloat16),
  np.array(3, np.int64),
  np.zeros([0, 2], np.float16),
]
LAYOUT = layout_of(ARRAYS)


def joined(weight, arrays=ARRAYS):
  return b"".join(packed(Content(bytes(32), weight, arrays)))


def test_arrays_come_back_as_they_were_and_the_size_is_known():
  content = b"".join(packed(Content(b"s" * 32, 2.5, ARRAYS)))
  assert TAG_BYTES + len(content) == LAYOUT.sealed_bytes
  back = unpacked(content, LAYOUT)
  assert back is not None
  state, weight, arrays = back
  assert (state, weight) == (b"s" * 32, 2.5)
  for mine, theirs in zip(ARRAYS, arrays, strict=True):
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    assert mine.tobytes() == theirs.tobytes()


def test_values_are_in_little_endian_order():
  assert bytes(raw_bytes(np.array([1], ">i4"))) == b"\1\0\0\0"
  (back,) = arrays_in(b"\1\0\0\0", layout_of([np.array([0], ">i4")]))
  assert back == 1


@pytest.mark.parametrize(
  "other",
  [
    [np.zeros([3, 2], np.float32), *ARRAYS[1:]],
    [np.zeros([2, 3], np.int32), *ARRAYS[1:]],
    ARRAYS[:-1],
    ARRAYS[1:],
  ],
)
def test_another_layout_is_refused(other):
  assert unpacked(joined(1.0, other), LAYOUT) is None


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_a_weight_that_is_none_is_refused(weight):
  assert unpacked(joined(weight), LAYOUT) is None


def test_cut_or_missing_content_is_refused():
  content = joined(1.0)
  assert unpacked(content[:-1], LAYOUT) is None
  assert unpacked(content + b"\0", LAYOUT) is None
  assert unpacked(None, LAYOUT) is None
