import dataclasses
import sys

import jax
import numpy as np
import pytest

from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import (
  DataConfig,
  ModelConfig,
  SyncConfig,
)
from dilocox_jax.models import loss, transformer
from dilocox_jax.trees import leaves_by_path
from experiments.benchmarks import peer_decoder, peers

SMALL = RunConfig(
  total_steps=12,
  data=DataConfig(source="synthetic", batch_size=4, sequence_length=8),
  model=ModelConfig(preset="nano", scan_unroll=1),
  sync=SyncConfig(method="diloco", sync_interval=4),
)


def test_without_pytorch_one_line_says_how_to_install_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "torch", None)
  with pytest.raises(ValueError, match="make bench-peers.*dilocox_jax.peers"):
    peer_decoder.load_torch()


def test_a_model_with_other_parts_is_refused_with_their_names():
  shape = dataclasses.replace(
    SMALL.model.shape, activation="gelu", tied_head=True
  )
  with pytest.raises(ValueError, match="no activation, tied_head: unset it"):
    peer_decoder.peer_loss(shape, 8)


def test_the_decoder_in_pytorch_is_the_same_function():
  torch = pytest.importorskip("torch")
  shape = SMALL.model.shape
  model = transformer.build_model(shape)
  params = model.init(jax.random.key(0))
  # Large parameters, so that no part of the model is near zero.
  params = jax.tree.map(lambda leaf: 5 * leaf, params)
  tokens = jax.random.randint(jax.random.key(1), (4, 9), 0, 256)
  leaves = leaves_by_path(jax.tree.map(np.asarray, params))
  theirs = peer_decoder.peer_loss(shape, 8)(
    peer_decoder.peer_params(leaves), torch.tensor(tokens.tolist())
  )
  ours = loss.next_token_loss(model, params, tokens)
  assert abs(float(ours) - float(theirs)) < 1e-5


def test_rounds_in_pytorch_train_alike_with_the_outer_step_included():
  pytest.importorskip("torch")
  rounds = peers.Rounds(SMALL)
  other = rounds.peer(compiled=False)
  # Both have run two rounds already.
  for _ in range(2):
    np.testing.assert_allclose(rounds.run(), other(), rtol=0, atol=1e-5)
