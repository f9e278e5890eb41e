"""A real run with a simulated clock: the clock is told, never asked."""

import dataclasses
import json
from unittest import mock

import pytest

from dilocox_jax.api import simulation_setup as setup
from dilocox_jax.api.simulation_setup import ClusterClock, Options
from dilocox_jax.config import to_plan
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.training.checkpoint import RefusedError
from tests import runs

OPTIONS = Options(step_s=0.25)


def placed(config):
  """A run on a cluster of 100 Mbit/s, ready to be timed."""
  return setup.set_up(config, setup.cluster_of(config, "100mbit"), OPTIONS)


def clocked(
  config, workdir, cluster: str | None = "100mbit", until=None, options=OPTIONS
):
  """A run, to its end or killed, that carries a clock if one is named."""
  clock = ClusterClock(config, cluster, options) if cluster else None
  make = runs.trainer

  def with_clock(config, workdir):
    made = make(config, workdir)
    made.clock = clock
    return made

  with mock.patch.object(runs, "trainer", with_clock):
    runs.train(config, workdir, until=until)
  return workdir


def times(workdir, event):
  rows = map(json.loads, (workdir / "timing.jsonl").read_text().splitlines())
  return {r["step"]: r["simulated_s"] for r in rows if r["event"] == event}


@pytest.mark.slow
def test_no_loss_depends_on_the_link(tmp_path):
  config = runs.settings(method="diloco")
  found = [
    runs.metrics_text(clocked(config, tmp_path / str(name), name))
    for name in ("100mbit", "100gbit", None)
  ]
  assert found[0] == found[1] == found[2]
  slow, fast = (
    times(tmp_path / name, "round") for name in ("100mbit", "100gbit")
  )
  assert slow.keys() == fast.keys()
  assert max(slow.values()) > max(fast.values())


@pytest.mark.slow
def test_a_killed_run_ends_where_the_simulator_does(tmp_path):
  config = runs.settings()
  clocked(config, tmp_path, until=9)
  assert max(times(tmp_path, "round")) <= 9
  clocked(config, tmp_path)
  made = placed(config)
  expected = run_time(made.link_costs, made.work, made.script.ops(made.plan))
  assert times(tmp_path, "evaluation")[21] == expected.now_s
  assert expected.now_s > 21 * 0.25


def larger(config):
  """The same run with a model that has more bytes to send."""
  model = dataclasses.replace(config.model, model_dim=64)
  return dataclasses.replace(config, model=model)


def test_a_run_can_be_timed_as_one_of_a_larger_model():
  config = runs.settings(method="diloco")  # Every exchange is waited for.
  plan = to_plan.run_plan(config)
  traffic = to_plan.traffic(config)
  clock = ClusterClock(config, "100mbit", OPTIONS, timed=larger(config))
  assert "B parameters" in clock.description
  for segment in plan.segments():
    clock.advance(segment, traffic)
  found = clock.finish(plan, traffic)
  made = [placed(c) for c in (config, larger(config))]
  own, expected = (
    run_time(m.link_costs, m.work, m.script.ops(m.plan)).now_s for m in made
  )
  assert found == expected > own


def test_only_the_clock_of_another_model_names_a_model():
  config = runs.settings(method="diloco")
  clock = ClusterClock(config, "100mbit", OPTIONS)
  assert clock.description == "cluster 100mbit"


def test_a_run_whose_schedule_is_another_is_not_timed_in_its_place():
  adapts = runs.settings(
    exchange={"codec": "low_rank(rank=4)+int"}, adaptive={"mode": "rank"}
  )
  for config, timed, said in (
    (runs.settings(), runs.settings(sync_interval=7), "the same steps, method"),
    (adapts, adapts, "adaptive.mode='rank' changes rank and H"),
  ):
    with pytest.raises(ValueError, match=said):
      ClusterClock(config, "100mbit", OPTIONS, timed)


def test_an_unknown_transport_is_refused():
  with pytest.raises(ValueError, match="'pigeons'"):
    Options(transport="pigeons")


@pytest.mark.parametrize(
  "before, after, said",
  [
    (("100mbit", OPTIONS), ("1gbit", OPTIONS), "--cluster=1gbit or --step_s"),
    (("100mbit", OPTIONS), ("100mbit", Options(step_s=0.5)), "or --step_s"),
    (("100mbit", OPTIONS), (None, OPTIONS), "began with --cluster"),
    ((None, OPTIONS), ("100mbit", OPTIONS), "began without --cluster"),
  ],
)
def test_a_run_keeps_the_clock_that_it_began_with(
  tmp_path, before, after, said
):
  config = runs.settings(method="diloco")
  clocked(config, tmp_path, before[0], 9, before[1])
  kept = runs.files(tmp_path)
  with pytest.raises(RefusedError, match=said):
    clocked(config, tmp_path, after[0], None, after[1])
  assert runs.files(tmp_path) == kept
