import pytest

from dilocox_jax.checks import flat
from dilocox_jax.config import from_mapping
from dilocox_jax.config.platforms import chosen_values, on_platform

LONG = {"data": {"sequence_length": 2048}}
OPEN = (
  "model.attention",
  "model.compute_dtype",
  "model.loss_chunk_tokens",
  "model.remat",
  "model.scan_unroll",
  "mesh.stacked_by",
)


def chosen(platform, values):
  config = on_platform(from_mapping(values), platform)
  return [flat(config.to_mapping())[path] for path in OPEN]


@pytest.mark.parametrize(
  ("platform", "values"),
  [
    ("cpu", ["plain", "float32", 0, "none", 0, "map"]),
    ("gpu", ["cudnn", "bfloat16", 1024, "dots", 1, "vmap"]),
    ("tpu", ["splash", "bfloat16", 1024, "dots", 1, "vmap"]),
    ("rocm", ["blockwise", "bfloat16", 1024, "dots", 1, "vmap"]),
  ],
)
def test_a_device_gets_what_is_fast_there(platform, values):
  assert chosen(platform, LONG) == values


def test_what_was_chosen_is_named_and_nothing_else_changes():
  config = from_mapping({"model": {"compute_dtype": "float32"}})
  chosen = chosen_values(config, "gpu")
  assert set(chosen) == set(OPEN) - {"model.compute_dtype"}
  assert chosen_values(on_platform(config, "gpu"), "gpu") == {}
  own = chosen_values(config, "gpu", has_own_model=True)
  assert own == {"mesh.stacked_by": "vmap"}
  divided = from_mapping({"mesh": {"layout": "mesh", "num_data_shards": 2}})
  assert "model.remat" not in chosen_values(divided, "gpu")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_value_that_is_set_wins(platform):
  model = {"attention": "blockwise", "compute_dtype": "float32"}
  model |= {"loss_chunk_tokens": 7, "remat": "full", "scan_unroll": 2}
  values = {"model": model, "mesh": {"stacked_by": "map"}}
  wanted = ["blockwise", "float32", 7, "full", 2, "map"]
  assert chosen(platform, values) == wanted


@pytest.mark.parametrize(
  ("platform", "values"),
  [
    ("gpu", {"model": {"compute_dtype": "float32"}}),
    ("gpu", {"data": {"document_masks": True}}),
    ("gpu", {"model": {"head_dim": 20}}),
    ("gpu", {"model": {"head_dim": 136}}),
    ("tpu", {"data": {"sequence_length": 100}}),
  ],
)
def test_a_kernel_that_does_not_fit_gives_way(platform, values):
  assert chosen(platform, values)[0] == "blockwise"
