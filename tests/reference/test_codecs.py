"""The codecs of messages in plain numpy are those of the fast code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs import batching
from dilocox_jax.codecs.named import named_codec
from dilocox_jax.reference import codecs

# Two leaves share a width, some rows are padded, and one leaf has no axis.
SHAPES = {
  "blocks/mlp/kernel": (3, 10, 30),
  "blocks/norm/scale": (3, 7),
  "bias": (5,),
  "embedding": (4, 30),
  "head": (50, 7),
  "scale": (),
}


def drawn_tree():
  rng = np.random.default_rng(0)
  return {
    name: np.asarray(rng.normal(size=shape), np.float32)
    for name, shape in SHAPES.items()
  }


def layered(tree):
  """The leaves as the fast code takes them, each with an axis of layers."""
  return [
    jnp.asarray(leaf if name.startswith("blocks/") else leaf[np.newaxis])
    for name, leaf in tree.items()
  ]


@pytest.mark.parametrize("name", codecs.CODECS)
@pytest.mark.parametrize("most_concatenated", [2**22, 200])
def test_a_message_is_that_of_the_fast_code(
  name, most_concatenated, monkeypatch
):
  monkeypatch.setattr(codecs, "MOST_CONCATENATED", most_concatenated)
  monkeypatch.setattr(batching, "_MOST_CONCATENATED", most_concatenated)
  tree = drawn_tree()
  leaves = layered(tree)
  fast = named_codec(name).encoder
  expected = jax.device_get(fast.encode(leaves))
  arrays = codecs.CODECS[name].encode(tree)
  assert [(x.dtype, x.shape) for x in arrays] == [
    (x.dtype, x.shape) for x in expected
  ]
  for array, expected_array in zip(arrays, expected, strict=True):
    # Scales are sums in another order, so a bfloat16 may be its neighbor.
    tolerance = 2**-7 if array.dtype.name == "bfloat16" else 0
    np.testing.assert_allclose(
      array.astype(np.float32),
      expected_array.astype(np.float32),
      rtol=tolerance,
    )
  decoded = codecs.CODECS[name].decode(expected, tree)
  received = fast.decode(expected, [leaf.shape for leaf in leaves])
  assert list(decoded) == list(tree)
  for path, leaf in zip(tree, received, strict=True):
    np.testing.assert_array_equal(
      decoded[path], np.asarray(leaf).reshape(SHAPES[path])
    )


def test_signs_are_as_in_the_docstring():
  tree = {"w": np.array([0.5, -1.0, 1.5, 2.0, 0.0, -4.0], np.float32)}
  codec = codecs.Signs(block_size=4)
  bits, scales = codec.encode(tree)
  assert bits.tolist() == [[[0b010], [0b100]]]
  assert scales.astype(np.float32).tolist() == [[[1.0], [2.0]]]
  received = codec.decode([bits, scales], tree)["w"]
  assert received.tolist() == [1.0, -1.0, 1.0, 2.0, 2.0, -2.0]


def test_what_is_too_large_saturates():
  tree = {"w": np.array([np.inf, -1.0], np.float32)}
  largest = np.finfo(np.float32).max
  assert codecs.Float32().encode(tree)[0].ravel().tolist() == [largest, -1.0]
