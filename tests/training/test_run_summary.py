import jax

from dilocox_jax.api.simulation_setup import ClusterClock, Options
from dilocox_jax.config import to_plan
from dilocox_jax.training import run_text
from dilocox_jax.training.run_summary import clock_at_end_s, summary_lines
from tests import runs


def _lines(config):
  return summary_lines(
    config,
    run_text.run_data(config),
    to_plan.run_plan(config),
    to_plan.traffic(config),
  )


def test_a_method_with_rounds_names_its_schedule_and_its_bytes():
  config = runs.settings(
    method="streaming_diloco", num_fragments=2, overlap_steps=1
  )
  model, text, method = _lines(config)
  assert model.startswith("model nano: ") and "2 replicas on 1 device" in model
  assert jax.devices()[0].device_kind in model
  assert text.startswith("text synthetic: ") and "21 inner steps" in text
  traffic = to_plan.traffic(config)
  sent_bytes = traffic.exchange_bytes(0) + traffic.exchange_bytes(1)
  assert "H = 3, P = 2, tau = 1, codec float32" in method
  assert f"{sent_bytes / 1000:.1f} kB a round" in method


def test_a_method_without_rounds_names_its_bytes_a_step():
  config = runs.settings(
    method="allreduce", sync_interval=None, steps_per_dispatch=3
  )
  (*_, method) = _lines(config)
  assert method.startswith("method allreduce: codec float32, a replica sends")
  assert method.endswith("a step") and "H =" not in method


def test_an_average_is_said_to_be_what_is_evaluated():
  config = runs.settings(method="diloco", outer={"average_power": 8.0})
  (*_, average) = _lines(config)
  assert average == (
    "evaluated and kept: an average of the parameters (power 8)"
  )


def test_a_clock_tells_when_the_run_ends_and_is_not_moved():
  config = runs.settings(method="diloco")
  clock = ClusterClock(config, "100mbit", Options(step_s=600.0))
  plan, traffic = to_plan.run_plan(config), to_plan.traffic(config)
  before = clock.get_state()
  end_s = clock_at_end_s(clock, plan, traffic)
  assert 21 * 600 < end_s < 21 * 600 + 60 and clock.get_state() == before
  clock.advance(plan.segment(0), traffic)
  assert clock_at_end_s(clock, plan, traffic, 3) == end_s
