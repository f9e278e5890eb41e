import dataclasses
import math

import pytest

from dilocox_jax.plan.model.presets import (
  BYTE_VOCABULARY,
  MODEL_PRESETS,
  nano,
  tiny,
)
from dilocox_jax.plan.model.shapes import parameter_count


def test_the_tiny_preset_weighs_what_its_gelu_twin_of_four_widths_does():
  twin = dataclasses.replace(tiny, activation="gelu", ff_dim=4 * tiny.model_dim)
  assert math.isclose(
    parameter_count(tiny), parameter_count(twin), rel_tol=0.01
  )


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_every_preset_can_read_bytes(name):
  assert MODEL_PRESETS[name].vocab_size >= BYTE_VOCABULARY


def test_the_preset_for_tests_has_two_of_everything_that_is_stacked():
  assert nano.num_layers >= 2
  assert nano.num_heads >= 2
  assert 20 * parameter_count(nano) < parameter_count(tiny)


# Parameters that papers or their authors' own checkpoints state.
PUBLISHED = {
  # The checkpoint of OPT-1.3B, less two rows of positions that nothing reads.
  "opt_1_3b": 1_315_758_080 - 2 * 2048,
  "llama_1_1b": 1_100_048_384,  # TinyLlama.
  "chinchilla_35m": 35e6,  # Streaming DiLoCo, by the name of the size.
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_that_are_published_are_ours_within_a_percent(name):
  found = parameter_count(MODEL_PRESETS[name])
  assert math.isclose(found, PUBLISHED[name], rel_tol=0.01)


def test_the_150m_of_open_diloco_leaves_out_both_tables():
  shape = MODEL_PRESETS["llama_150m"]
  tables = 2 * shape.vocab_size * shape.model_dim
  assert math.isclose(parameter_count(shape) - tables, 150e6, rel_tol=0.01)


def test_the_107b_is_the_110b_of_qwen_without_two_layers():
  """Qwen counts 111 billion as 110; DiLoCoX's name follows that count."""
  found = parameter_count(MODEL_PRESETS["qwen_107b"])
  whole = dataclasses.replace(MODEL_PRESETS["qwen_107b"], num_layers=80)
  left_out = parameter_count(whole) - found
  assert math.isclose(110e9 - left_out, 107e9, rel_tol=0.01)
  # The name is a round number: the sizes give 1.4 % more.
  assert 0.01 < found / 107e9 - 1 < 0.015
