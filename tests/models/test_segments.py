import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.models.loss import next_token_loss
from dilocox_jax.models.segments import segment_ids, segment_positions
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.presets import nano

END = 3
# Documents of 5, 1, 7 and 3 tokens, of which only the first has no mark.
DOCUMENTS = [
  np.array([9, 8, 7, 8, 9]),
  np.array([END]),
  np.array([END, 4, 5, 6, 4, 5, 6]),
  np.array([END, 200, 100]),
]
PACKED = jnp.asarray(np.concatenate(DOCUMENTS)[None], jnp.int32)
LEARNED = {"positions": "learned", "num_positions": 16}
MODEL = build_model(nano)
PARAMS = jax.tree.map(lambda leaf: 3 * leaf, MODEL.init(jax.random.key(0)))
# The sums of attention over a row of 16 and of 7 tokens are rounded otherwise.
TOLERANCE = 1e-5


def test_segments_and_positions_are_those_of_the_documents():
  sizes = [len(document) for document in DOCUMENTS]
  ids = segment_ids(PACKED, END)
  np.testing.assert_array_equal(ids[0], np.repeat(range(4), sizes))
  places = np.concatenate([np.arange(size) for size in sizes])
  np.testing.assert_array_equal(segment_positions(ids)[0], places)


@pytest.mark.parametrize("learned", [{}, LEARNED], ids=["rope", "learned"])
def test_a_packed_document_has_the_logits_that_it_has_alone(learned):
  shape = dataclasses.replace(nano, **learned)
  model = build_model(shape)
  params = jax.tree.map(lambda leaf: 3 * leaf, model.init(jax.random.key(0)))
  packed = model.apply(params, PACKED, segment_ids(PACKED, END))
  alone = [
    model.apply(params, jnp.asarray(document[None], jnp.int32))
    for document in DOCUMENTS
  ]
  expected = jnp.concatenate(alone, axis=1)
  chex.assert_trees_all_close(packed, expected, atol=TOLERANCE)
  plain = model.apply(params, PACKED)
  assert not jnp.allclose(plain, expected, atol=1e-2)


def test_no_loss_of_a_document_has_a_gradient_at_another():
  """The rows of the token table are those of the documents' own tokens."""

  def last(params):  # The last document predicts 100 from END and 200.
    logits = MODEL.apply(params, PACKED, segment_ids(PACKED, END))
    return jax.nn.log_softmax(logits[0, -2])[100]

  rows = jax.grad(last)(PARAMS)["embed"]["embedding"]
  (read,) = np.nonzero(np.abs(rows).sum(axis=1))
  np.testing.assert_array_equal(read, [END, 200])


def test_the_loss_of_packed_documents_is_the_mean_of_theirs():
  # Each document predicts its tokens and the end; the last one has no end.
  def losses(document, following):
    row = jnp.asarray([*document, following], jnp.int32)[None]
    return next_token_loss(MODEL, PARAMS, row) * len(document)

  alone = [losses(document, END) for document in DOCUMENTS[:-1]]
  alone.append(losses(DOCUMENTS[-1][:-1], 100))
  packed = next_token_loss(MODEL, PARAMS, PACKED, end_of_text=END)
  mean = sum(alone) / (PACKED.size - 1)
  np.testing.assert_allclose(packed, mean, rtol=TOLERANCE)
  assert abs(next_token_loss(MODEL, PARAMS, PACKED) - mean) > 1e-3
