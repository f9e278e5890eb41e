from unittest import mock

import numpy as np
import pytest

import dilocox_jax as dx
from dilocox_jax.api import simulation_setup
from dilocox_jax.api.simulation_setup import Options, set_up
from dilocox_jax.config import from_mapping
from dilocox_jax.plan.model.shapes import parameter_count
from tests import runs

STEP_S = 9.0


def test_a_config_and_a_cluster_make_a_priced_run():
  config = runs.settings()
  setup = set_up(config, "100mbit", Options(step_s=0.5))
  assert setup.plan.total_steps == config.total_steps
  assert setup.work.step_s.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
  ("boundary", "compute_dtype", "token_bytes"),
  [
    ("none", "auto", 2 * 8192),
    ("none", "float32", 4 * 8192),
    ("bfloat16", "float32", 2 * 8192),
    ("int8", "auto", 8192 + 4),
  ],
)
def test_a_hop_of_a_pipeline_sends_what_its_boundary_sends(
  boundary, compute_dtype, token_bytes
):
  config = from_mapping(
    {
      "model": {"preset": "qwen_107b", "compute_dtype": compute_dtype},
      "mesh": {"layout": "mesh", "num_stages": 2, "boundary": boundary},
    }
  )
  tokens = config.tokens_per_replica_step
  with mock.patch.object(simulation_setup, "step_seconds") as found:
    found.return_value = np.ones(2), 0.0
    set_up(config, "dilocox_107b", Options())
  assert found.call_args.args[3] == token_bytes * tokens


@pytest.mark.parametrize(
  ("optimizer", "copies"), [("adamw", 3), ("sgd", 1), ("lion", 2)]
)
def test_a_copied_state_has_the_optimizers_own(optimizer, copies):
  config = runs.settings(inner={"optimizer": optimizer})
  script = set_up(config, "1gbit", Options(step_s=0.5)).script
  size = parameter_count(config.model.shape)
  assert script.copied_bytes == 4 * copies * size


def test_seconds_must_be_a_number():
  with pytest.raises(ValueError, match="step_s=nan must be seconds"):
    Options(step_s=float("nan"))


def seconds(rounds, interval, fragments, overlap, order, bits):
  """Simulated time of some rounds of a 107B model over 1 Gbit/s."""
  config = from_mapping(
    {
      "total_steps": rounds * interval,
      "model": {"preset": "qwen_107b"},
      "data": {"batch_size": 8, "sequence_length": 2048},
      "sync": {
        "method": "delayed",
        "sync_interval": interval,
        "num_fragments": fragments,
        "overlap_steps": overlap,
        "fragment_order": order,
      },
      "exchange": {"codec": f"int(bits={bits})"},
    }
  )
  return dx.estimate(config, "dilocox_107b", step_s=STEP_S).total_s


# One bit a value takes the line for 14.2 steps, so H = 15 at least; 2 bits for
# 28.3, so H = 29.
@pytest.mark.parametrize(
  ("interval", "fragments", "overlap", "order", "bits"),
  [
    (16, 4, 4, "sliced", 1),
    (16, 8, 2, "sliced", 1),
    (16, 16, 1, "sliced", 1),
    (15, 15, 1, "sliced", 1),
    (30, 15, 2, "sliced", 2),
  ],
)
def test_equal_fragments_keep_replicas_and_line_busy(
  interval, fragments, overlap, order, bits
):
  shape = interval, fragments, overlap, order, bits
  four_rounds_s = seconds(8, *shape) - seconds(4, *shape)
  assert 4 * interval * STEP_S / four_rounds_s > 0.99
  assert overlap <= interval / fragments + 1


def test_fragments_of_whole_layers_do_not():
  shape = 16, 4, 4, "strided", 1
  four_rounds_s = seconds(8, *shape) - seconds(4, *shape)
  assert 4 * 16 * STEP_S / four_rounds_s < 0.92
