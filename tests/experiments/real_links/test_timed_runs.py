from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.metrics import Timing
from dilocox_jax.simulate.transfer import GLOO, NCCL
from experiments.real_links import timed_runs
from experiments.real_links.cases import predicted_s
from experiments.real_links.network import equal_cluster


def planned(name, interval, changes=()):
  """The config that a setting has in the simulator's eyes."""
  sync: dict[str, Any] = {"method": name}
  if name != "allreduce":
    sync["sync_interval"] = interval
  for change in changes:
    field, value = change.removeprefix("sync.").split("=")
    sync[field] = int(value) if value.isdigit() else value
  return from_mapping({"sync": sync})


def run_of(seconds, num_steps) -> Any:
  """A run with these seconds and steps a segment; the first four compile."""
  timings, rounds, step = [], [], 0
  for wall_s, count in zip([99.0] * 4 + seconds, num_steps, strict=True):
    step += count
    timings.append(Timing(step, "round", wall_s, link_bytes=105))
    rounds.append(SimpleNamespace(step=step, sent_bytes=100))
  timings.append(Timing(step, "checkpoint", 50.0))
  return SimpleNamespace(timings=timings, rounds=rounds)


def test_seconds_and_bytes_are_those_of_a_step_after_compiling():
  run = run_of([4.0, 2.0, 1.0], [4, 4, 4, 4, 4, 4, 1])
  assert timed_runs.seconds_per_step(run) == 1.0
  counted = timed_runs.segments(run)[4:]
  assert timed_runs.ratio_of_bytes(counted) == pytest.approx(1.05)


@pytest.mark.parametrize("transport", [GLOO, NCCL])
def test_the_link_is_as_slow_as_the_ratio_wants(transport):
  rate_bps = timed_runs.rate_for(2.0, transport)
  cluster = equal_cluster(f"{rate_bps / 1e6:.6f} Mbit/s", 2)
  config = from_mapping({"sync": {"method": "allreduce"}})
  gradient = to_plan.traffic(config).gradient()
  assert predicted_s(cluster, transport, *gradient) == pytest.approx(2.0)
  # A step of AllReduce is an inner step, and then its exchange.
  step_s = timed_runs.predicted_step_s(config, cluster, transport, 0.0625)
  assert step_s == pytest.approx(2.0625)
