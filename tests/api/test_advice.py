"""What the adviser proposes for a large model, and why."""

import dataclasses
import json
import math
from typing import Any

import pytest

from dilocox_jax.api import advice, candidates
from dilocox_jax.api.advice import Limits, advise
from dilocox_jax.api.device_memory import device_memory
from dilocox_jax.api.simulation_setup import Options
from dilocox_jax.config import from_mapping

# DiLoCoX's setting: rank 2048 in 4 bits every 125 steps.
PAPER = {
  "total_steps": 4000,
  "model": {"preset": "qwen_107b"},
  "data": {"batch_size": 8, "sequence_length": 2048},
  "sync": {"method": "dilocox", "sync_interval": 125},
  "codec": {"name": "low_rank+int", "rank": 2048, "bits": 4},
}
STEP_S = 9.0


@pytest.fixture(scope="module", autouse=True)
def few_settings_fixture():
  """Keeps one in ten of the settings; every method is still compared."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(candidates, "INTERVALS", (4, 16, 32, 96, 128, 192))
    patch.setattr(candidates, "_FRAGMENTS", (4,))
    patch.setattr(candidates, "_OVERLAPS", (4,))
    yield


@pytest.fixture(scope="module", name="found")
def found_fixture() -> Any:
  done = []
  config = from_mapping(PAPER)
  advice = advise(
    config,
    "dilocox_107b",
    step_s=STEP_S,
    on_progress=lambda n, of: done.append((n, of)),
  )
  assert done[0] == (0, done[-1][1]) and done[-1][0] == done[-1][1]
  return advice


def test_the_best_beats_the_papers_own_setting(found):
  sent = found.given.bytes_per_day
  limits = Limits(bytes_per_day=sent)
  config = from_mapping(PAPER)
  best: Any = advise(config, "dilocox_107b", step_s=STEP_S, limits=limits).best
  assert best.rounds.utilisation >= 0.99
  assert best.bytes_per_day <= sent
  assert best.gap.percent < found.given.gap.percent


def test_proposals_are_in_order_and_say_why_they_lost(found):
  best = found.best
  assert best is found.proposals[0] and not found.reason(best)
  allowed = [p for p in found.proposals if not p.against]
  refused = [p for p in found.proposals if p.against]
  assert found.proposals == [*allowed, *refused]
  fastest = max(p.tokens_per_s for p in allowed)
  assert best.tokens_per_s >= 0.995 * fastest
  close = [p for p in allowed if p.tokens_per_s >= 0.995 * fastest]
  assert best.gap.percent == min(p.gap.percent for p in close)
  assert all(found.reason(p) for p in found.proposals[1:])


def test_the_front_has_no_proposal_that_another_beats(found):
  for one in found.pareto:
    assert not any(
      other.tokens_per_s > one.tokens_per_s
      and other.gap.percent <= one.gap.percent
      for other in found.proposals
      if other.gap
    )


def test_numbers_go_together(found):
  for one in found.proposals:
    assert one.tokens_per_s == pytest.approx(2 * 8 * 2048 / one.rounds.step_s)
    assert one.hours(3600 * one.tokens_per_s) == pytest.approx(1)
    assert one.rounds.compute_s == pytest.approx(STEP_S)


def advice_on(cluster, config=None, **options) -> Any:
  config = config or from_mapping({"model": {"preset": "llama_150m"}})
  return advise(config, cluster, step_s=0.5, **options)


def cluster_file(path, *rates):
  sites = [
    {"name": f"s{n}", "up": rate, "down": rate, "num_devices": 1}
    for n, rate in enumerate(rates)
  ]
  path.write_text(json.dumps({"name": "test", "sites": sites}))
  return str(path)


def test_a_slow_link_is_given_another_setting_than_a_fast_one(tmp_path):
  rates = {"even": "50 Mbit/s", "mixed": "5 Mbit/s"}
  even, mixed = (
    cluster_file(tmp_path / f"{name}.json", "50 Mbit/s", rate)
    for name, rate in rates.items()
  )
  best = advice_on(even).best
  found = advice_on(mixed, best.config)
  assert found.given.config == best.config
  assert found.best.tokens_per_s > 1.05 * found.given.tokens_per_s
  assert "slower: a step waits" in found.reason(found.given)


def test_tokens_are_those_of_the_steps_that_uneven_replicas_take():
  config = from_mapping(
    {
      "model": {"preset": "llama_150m"},
      "sync": {"method": "diloco", "sync_interval": 16},
      "membership": {"inner_steps": "16,8"},
    }
  )
  given = advice_on("1gbit", config).given
  tokens = 1.5 * config.tokens_per_replica_step
  assert given.tokens_per_s == pytest.approx(tokens / given.rounds.step_s)


def test_limits_are_kept_or_nothing_is_proposed():
  one = advice_on("1gbit", limits=Limits(device_bytes=1e6))
  assert one.best is None
  assert one.proposals[0].against == (
    f"a device needs {one.proposals[0].memory.total / 1e9:.3g} GB and has 0.001"
  )


def test_a_mesh_is_chosen_with_the_memory_of_the_methods_own_optimizer():
  # Muon holds whole layers for a while, and AdamW does not.
  config = from_mapping({"model": {"preset": "llama_150m"}})
  mesh = {"mesh.layout": "mesh", "mesh.num_stages": 2}
  divided: Any = candidates.changed(config, mesh)
  division = advice._division(mesh, divided, "1gbit", Options(step_s=1.0))
  for method in ("muloco", "diloco"):
    one: Any = candidates.changed(divided, mesh | {"sync.method": method})
    found = division.memory_bytes(one)
    assert round(found) == device_memory(one).total


@pytest.mark.slow
def test_meshes_are_compared_where_the_step_is_not_stated(tmp_path):
  path = tmp_path / "c.json"
  site = {"up": "1 Gbit/s", "down": "1 Gbit/s", "num_devices": 4}
  sites = [site | {"name": "a"}, site | {"name": "b"}]
  path.write_text(json.dumps({"name": "test", "sites": sites}))
  config = from_mapping({"model": {"preset": "small"}})
  open_: Any = advise(config, str(path)).best
  tight: Any = advise(
    config, str(path), limits=Limits(device_bytes=0.8 * open_.memory.total)
  )
  assert open_.config.mesh.num_stages == 1
  assert tight.best.memory.total <= 0.8 * open_.memory.total
  assert tight.best.config.division.num_devices == 4
  assert dataclasses.asdict(Limits())["device_bytes"] == math.inf


def test_a_batch_that_no_mesh_divides_says_what_to_take(tmp_path):
  path = tmp_path / "d.json"
  site = {"up": "1 Gbit/s", "down": "1 Gbit/s", "num_devices": 7}
  sites = [site | {"name": "a"}, site | {"name": "b"}]
  path.write_text(json.dumps({"name": "test", "sites": sites}))
  with pytest.raises(ValueError, match="take a multiple of 7$"):
    advise(from_mapping({}), str(path))
