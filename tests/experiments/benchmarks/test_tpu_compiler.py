import importlib.util

import pytest

from dilocox_jax.config import from_mapping
from experiments.benchmarks.tpu_compiler import KERNEL, compiled_for_tpu

SMALL = {
  "model": {"preset": "nano", "model_dim": 256, "num_heads": 4},
  "data": {"sequence_length": 1024, "batch_size": 2},
}
HAS_COMPILER = importlib.util.find_spec("libtpu") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs libtpu")
def test_the_compiler_of_tpus_takes_the_kernels_and_says_what_they_need():
  temporary = {}
  for attention in ("auto", "plain"):
    model = {**SMALL["model"], "attention": attention}
    config = from_mapping(SMALL | {"model": model})
    compiled = compiled_for_tpu(config, "v5p:2x2x1")
    analysis = compiled.memory_analysis()
    assert analysis is not None
    temporary[attention] = analysis.temp_size_in_bytes
    assert (KERNEL in (compiled.as_text() or "")) == (attention == "auto")
  assert temporary["auto"] < 0.7 * temporary["plain"]


@pytest.mark.skipif(HAS_COMPILER, reason="libtpu is there")
def test_a_missing_compiler_is_named_in_one_line():
  with pytest.raises(ValueError, match=r"pip install 'dilocox_jax\[tpu\]'"):
    compiled_for_tpu(from_mapping(SMALL), "v5p:2x2x1")


def test_one_chip_holds_all_replicas():
  mesh = SMALL | {"mesh": {"layout": "mesh"}}
  with pytest.raises(ValueError, match="mesh.layout='stacked'"):
    compiled_for_tpu(from_mapping(mesh), "v5p:2x2x1")
