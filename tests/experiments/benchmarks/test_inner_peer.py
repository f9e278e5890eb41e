import importlib.util

import pytest

from dilocox_jax.config import from_mapping
from experiments.benchmarks import inner_peer

SMALL = {
  "model": {"preset": "nano"},
  "data": {"batch_size": 2, "sequence_length": 16},
}
HAS_TORCH = importlib.util.find_spec("torch") is not None


def test_without_pytorch_there_is_no_rate(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  assert inner_peer.peer_rate(from_mapping(SMALL), 1, 1) is None


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch (CPU)")
def test_steps_in_pytorch_run_in_bfloat16():
  rate = inner_peer.measured_rate(
    from_mapping(SMALL), 2, 2, "cpu", compiled=False
  )
  assert rate > 0


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch (CPU)")
def test_a_model_that_pytorch_has_not_is_refused():
  gelu = SMALL | {"model": {"preset": "nano", "activation": "gelu"}}
  with pytest.raises(ValueError, match="PyTorch has no activation"):
    inner_peer.measured_rate(from_mapping(gelu), 1, 1, "cpu", compiled=False)
