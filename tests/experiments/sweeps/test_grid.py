import math
import subprocess
import sys

import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.mapping import flat
from experiments.configs import ablate_compression, ablate_sync
from experiments.sweeps import grid, run_spec

BASE = {"sync": {"sync_interval": 6}, "total_steps": 60}


def names(ablation):
  return [trial.name for trial in grid.trials({"base": BASE, **ablation})]


def test_a_grid_is_the_full_product_in_order():
  found = grid.trials(
    {
      "base": BASE,
      "grid": {"codec.name": ("int",), "codec": {"bits": (8, 4)}}
      | {"outer.momentum": [0.0, 0.5, 0.9]},
    }
  )
  drawn = [(t.config.codec.bits, t.config.outer.momentum) for t in found]
  assert drawn == [(b, m) for b in (8, 4) for m in (0.0, 0.5, 0.9)]
  assert {t.config.sync.sync_interval for t in found} == {6}
  assert found[0].name == "codec.name=int,bits=8,outer.momentum=0"


def test_listed_runs_follow_the_grid_and_may_have_names():
  found = names(
    {
      "grid": {"sync.sync_interval": (3,)},
      "runs": [
        {"name": "mine", "outer.momentum": 0.1},
        {"sync.sync_interval": 12},
      ],
    }
  )
  assert found == ["sync_interval=3", "mine", "sync_interval=12"]


def test_every_setting_is_run_with_every_seed():
  found = grid.trials(
    {"base": BASE, "grid": {"sync.sync_interval": (3, 6)}, "seeds": (4, 5)}
  )
  seeds = [(t.config.sync.sync_interval, t.config.seed) for t in found]
  assert seeds == [(3, 4), (3, 5), (6, 4), (6, 5)]


def test_what_means_one_run_is_run_once():
  lines = [{}, {"sync.sync_interval": 6}, {"checkpoint.keep": 8}]
  assert names({"runs": lines}) == ["base"]


def test_a_trial_keeps_its_name_and_digest_when_the_grid_grows():
  few = grid.trials({"base": BASE, "grid": {"sync.sync_interval": (3, 6)}})
  more = grid.trials({"base": BASE, "grid": {"sync.sync_interval": (2, 3, 6)}})

  def known_by(run):
    return run.label, run_spec.run_digest(run.config)

  assert [known_by(t) for t in few] == [known_by(t) for t in more[1:]]


def test_only_what_differs_somewhere_is_said_to_vary():
  found = grid.trials(
    {
      "base": BASE,
      "runs": [
        {"sync.sync_interval": 6, "outer.momentum": 0.5},
        {"sync.sync_interval": 6, "outer.momentum": 0.9},
      ],
    }
  )
  assert grid.varied(found) == [
    {"outer.momentum": 0.5},
    {"outer.momentum": 0.9},
  ]


@pytest.mark.parametrize(
  "ablation, message",
  [
    ({}, "nothing to run"),
    ({"gird": {}}, "field 'gird': did you mean 'grid'?"),
    ({"grid": {"codec.rnk": (1,)}}, "did you mean 'rank'?"),
    ({"grid": {"codec.rank": 8}}, "grid.codec.rank=8 must be a list"),
    ({"grid": {"codec.rank": ()}}, "must be a list"),
    ({"runs": [{"sync.intervall": 3}]}, "did you mean 'sync_interval'?"),
    ({"runs": [{"name": "x", "codec.bits": 5}]}, "run 'x': codec.bits=5"),
    ({"runs": [{"total_steps": "ten"}]}, "total_steps='ten' must be of type"),
    ({"runs": [{"seed": 3}]}, "give the ablation's seeds"),
    ({"runs": ["int4"]}, r"runs\[0\]='int4' must map fields"),
    (
      {"runs": [{"name": "a"}, {"name": "a", "total_steps": 9}]},
      "two runs are called 'a'",
    ),
  ],
)
def test_a_mistake_is_one_line_before_anything_runs(ablation, message):
  with pytest.raises(ValueError, match=message) as error:
    grid.trials({"base": BASE, **ablation})
  assert "\n" not in str(error.value)


def test_a_mistake_in_the_last_run_stops_the_first():
  runs = [{"outer.momentum": 0.1}, {"sync.sync_interval": 0}]
  with pytest.raises(ValueError, match="run 'sync_interval=0'"):
    grid.trials({"base": BASE, "runs": runs})


def ratio(**sections):
  config = from_mapping({"model": {"preset": "nano"}, **sections})
  return grid.times_fewer_bytes(config)


def test_bytes_of_a_sync_are_compared_with_fp32():
  assert ratio() == 1
  half = ratio(codec={"name": "float16"})
  # Not half, by the flags that say who takes part.
  assert half == pytest.approx(2, rel=1e-4) and half != 2
  streaming = {"method": "streaming_diloco", "num_fragments": 2}
  parted = ratio(codec={"name": "float16"}, sync=streaming)
  assert parted == pytest.approx(2, rel=1e-4)
  gradients = ratio(codec={"name": "float16"}, sync={"method": "allreduce"})
  assert gradients == pytest.approx(2, rel=1e-4)
  assert ratio(codec={"name": "int", "bits": 4}) > 2 * half


def test_bytes_that_are_none_or_change_have_no_ratio():
  assert math.isnan(ratio(mesh={"num_replicas": 1}))
  codec = {"name": "low_rank+int", "rank": 4}
  assert math.isnan(ratio(codec=codec, adaptive={"mode": "rank"}))


def test_the_compression_ablation_has_what_users_compare():
  found = grid.trials(ablate_compression.get_config().to_dict())
  parts = {part for t in found for part in t.config.codec.name.split("+")}
  assert len(found) >= 12
  assert {"float32", "float16", "int", "e3m0", "low_rank", "top_k"} < parts
  assert {t.config.codec.rank for t in found} >= {8, 16, 32}
  assert max(grid.times_fewer_bytes(t.config) for t in found) > 25


def test_the_sync_ablation_varies_each_field_alone():
  found = grid.trials(ablate_sync.get_config().to_dict())
  for field, values in ablate_sync.AROUND.items():
    alone = {
      flat(t.config.to_mapping())[field] for t in found if len(t.changed) < 2
    }
    assert alone == set(values)


def test_a_grid_is_read_without_jax():
  code = "import sys; from experiments.sweeps import grid; assert 'jax' not in "
  subprocess.run([sys.executable, "-c", f"{code} sys.modules"], check=True)
