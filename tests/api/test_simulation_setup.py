import pytest

from dilocox_jax.api.simulation_setup import Options, set_up
from tests import runs


def test_a_config_and_a_cluster_make_a_priced_run():
  config = runs.settings()
  setup = set_up(config, "100mbit", Options(step_s=0.5))
  assert setup.plan.total_steps == config.total_steps
  assert setup.work.step_s.tolist() == [0.5, 0.5]


def test_seconds_must_be_a_number():
  with pytest.raises(ValueError, match="step_s=nan must be seconds"):
    Options(step_s=float("nan"))
