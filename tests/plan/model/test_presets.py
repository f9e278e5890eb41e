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
