"""Arrays between processes: a piece of a wrong size is never an array."""

import numpy as np
import pytest

from dilocox_jax.distributed.channel import Channel


class Pieces(Channel):
  """A channel from which given pieces arrive, without other processes."""

  def __init__(self, *pieces):
    self._pieces = list(pieces)

  def receive(self, sender):
    return self._pieces.pop(0)


def received(*pieces):
  return Pieces(*pieces).receive_array(0, (2, 3), np.dtype(np.float32))


def test_an_array_arrives_as_it_was_sent():
  array = np.arange(6, dtype=np.float32).reshape(2, 3)
  np.testing.assert_array_equal(received(array.tobytes()), array)


@pytest.mark.parametrize("num_bytes", [0, 1, 23, 25])
def test_a_piece_of_a_wrong_size_is_refused(num_bytes):
  with pytest.raises(ValueError, match=f"sent {num_bytes} bytes instead of 24"):
    received(bytes(num_bytes))
