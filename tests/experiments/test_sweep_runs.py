"""Which runs a sweep has, how they are known, and when they would end."""

import re
import textwrap

import pytest

from dilocox_jax.api.simulation_setup import Options, cluster_of, set_up
from dilocox_jax.config import from_mapping
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.link_costs import LinkCosts
from experiments.configs import compression, convergence, grid
from experiments.runtime.config_flag import CONFIGS
from experiments.sweeps import runs
from experiments.sweeps.clocks import SweepClock, clock_of, clocks_of
from experiments.sweeps.finished import Rows
from experiments.sweeps.rows import run_id
from tests.experiments import programs

BASE = {"sync": {"sync_interval": 6}, "total_steps": 60}
ROOT = CONFIGS.parents[1]
SLOW = SweepClock("100mbit", 0.25)


def listed(**sweep):
  return runs.runs_of({"base": BASE, **sweep})


def test_a_grid_is_the_full_product_in_order():
  found = listed(
    grid={"sync": {"sync_interval": (3, 6)}, "outer.momentum": [0.0, 0.9]},
    seeds=(4, 5),
  )
  drawn = [
    (r.config.sync.sync_interval, r.config.outer.momentum, r.seed)
    for r in found
  ]
  assert drawn == [
    (h, m, s) for h in (3, 6) for m in (0.0, 0.9) for s in (4, 5)
  ]
  assert found[0].name == "sync_interval=3,outer.momentum=0"


def documented_config(page):
  """The first config of a sweep that a page shows."""
  text = (ROOT / page).read_text()
  block = re.search(r"\n\n(    from experiments.*?return config\n)", text, re.S)
  assert block
  return textwrap.dedent(block[1])


@pytest.mark.parametrize(
  ("page", "names"),
  [
    (
      "docs/commands.md",
      [
        f"sync_interval={interval},codec={codec}"
        for interval in (10, 30)
        for codec in ("float32", "int(bits=4)")
      ]
      + ["long rounds"],
    ),
    ("docs/guides/your_own_text.md", ["fp32", "4 bits", "rank 16"]),
  ],
)
def test_the_sweeps_that_pages_show_are_read(page, names, tmp_path):
  (tmp_path / "mine.py").write_text(documented_config(page))
  done = programs.run(
    "sweep",
    f"--config={tmp_path / 'mine.py'}",
    "--config.base.total_steps=40",
    f"--workdir={tmp_path / 'out'}",
    "--report_only",
  )
  assert done.returncode == 0, done.stderr
  shown = re.findall(r"^ (\S.*?) \(0 of 2 seeds\)", done.stdout, re.M)
  assert shown == names


def test_the_example_of_a_grid_has_four_runs():
  found = runs.runs_of(grid.get_config().to_dict())
  chosen = [
    (run.config.sync.sync_interval, run.config.inner.learning_rate)
    for run in found
  ]
  assert chosen == [(10, 1e-3), (10, 2e-3), (30, 1e-3), (30, 2e-3)]


def test_a_grid_in_a_plain_config_is_told_what_to_begin_with(tmp_path):
  plain = "config_dict.ConfigDict()"
  shown = documented_config("docs/commands.md").replace(
    "default.sweep()", plain
  )
  shown = shown.replace("config.base", "# ")
  path = tmp_path / "mine.py"
  path.write_text(f"from ml_collections import config_dict\n{shown}")
  done = programs.run("sweep", f"--config={path}", f"--workdir={tmp_path}/x")
  assert done.returncode == 2 and "default.sweep()" in done.one_line


def test_listed_runs_follow_the_grid_and_may_have_names_and_seeds():
  found = listed(
    grid={"sync.sync_interval": (3,)},
    runs=[
      {"name": "mine", "outer.momentum": 0.1, "seed": 7},
      {"name": "mine", "outer.momentum": 0.1, "seed": 8},
      {"sync.sync_interval": 12},
    ],
  )
  assert [(r.name, r.seed) for r in found] == [
    ("sync_interval=3", 0),
    ("mine", 7),
    ("mine", 8),
    ("sync_interval=12", 0),
  ]
  assert runs.changes(found)["mine"] == "sync_interval=6 outer.momentum=0.1"


def test_what_means_one_run_is_run_once_and_keeps_its_name():
  lines = [{}, {"sync.sync_interval": 6}, {"checkpoint.keep": 8}]
  (only,) = listed(runs=lines)
  (_, same) = listed(grid={"sync.sync_interval": (3, 6)})
  assert only.name == "base" and only.digest == same.digest


@pytest.mark.parametrize(
  "sweep, message",
  [
    ({"grid": {"outer.momentm": (1,)}}, "did you mean 'momentum'?"),
    ({"grid": {"outer.momentum": 8}}, "grid.outer.momentum=8 must be a list"),
    ({"runs": [{"sync.intervall": 3}]}, "did you mean 'sync_interval'?"),
    ({"runs": [{"name": "x", "outer.momentum": 5.0}]}, "run 'x': outer.mom"),
    ({"runs": ["int4"]}, r"runs\[0\]='int4' must map fields"),
    ({"runs": [{"name": "a"}], "baseline": "b"}, "baseline.* 'b'"),
    (
      {"runs": [{"name": "a"}, {"name": "a", "total_steps": 9}]},
      "two runs are called 'a'",
    ),
    ({"base": 3}, "base=3 must be of type dict"),
    ({"seeds": 3}, "seeds=3 must be of type list or tuple"),
    ({"baselines": "a"}, "baselines='a' must be of type dict"),
    ({"target_loss": "low"}, "target_loss='low' must be of type float"),
    ({"front": "diloco"}, "front='diloco' must be of type list or tuple"),
    ({"notes": "One text."}, "notes='One text.' must be of type list"),
  ],
)
def test_a_mistake_is_one_line_before_anything_runs(sweep, message):
  with pytest.raises(ValueError, match=message) as error:
    listed(**sweep)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "given",
  [
    {"sync.method": "dilocox", "total_steps": 180},
    {"sync.method": "muloco", "seed": 3, "inner.optimizer": "adamw"},
    {"sync.method": "allreduce", "inner.warmup_steps": 0},
    {"sync.method": "overlap_loco", "sync.sync_interval": 16},
    {"model.preset": "llama_1_1b", "exchange.codec": "low_rank(rank=256)"},
  ],
)
def test_overrides_make_the_same_run_again(given):
  (run,) = runs.runs_of({"base": {}, "runs": [given]})
  (again,) = runs.runs_of({}, [(run.name, run.overrides)])
  assert again.config == run.config and again.digest == run.digest
  from_flags = dict(
    flag.removeprefix("--config.").split("=", 1) for flag in run.arguments
  )
  assert all(from_flags[path] == str(value) for path, value in given.items())


@pytest.mark.parametrize(
  ("study", "config"),
  [
    ("compression", compression.get_config()),
    *(
      (f"convergence_{name}", convergence.get_config(name))
      for name in convergence.SWEEPS
    ),
  ],
  ids=["compression", *convergence.SWEEPS],
)
def test_every_config_of_a_sweep_has_its_baseline_and_its_committed_rows(
  study, config
):
  committed_rows = []
  settings = []
  if config.get("rows") and not (config.get("runs") or config.get("grid")):
    rows = Rows(ROOT / config.rows, study)
    committed_rows = list(rows.runs.values())
    settings = rows.settings
  found = runs.runs_of(config.to_dict(), settings)
  names = {run.name for run in found}
  baselines = config.get("baselines") or {}
  assert len(found) > 2 and config.baseline in names
  assert names >= {*baselines, *baselines.values()}
  if committed_rows:
    assert [
      run_id(study, run.digest, row.corpus)
      for run, row in zip(found, committed_rows, strict=True)
    ] == [row.run for row in committed_rows]


def config(method, **sync):
  return from_mapping(
    {"total_steps": 60, "inner": {"warmup_steps": 2}}
    | {"sync": {"method": method, **sync}, "exchange": {"codec": "float32"}}
  )


@pytest.mark.parametrize(
  "made",
  [
    config("allreduce"),
    config("dilocox", sync_interval=20),
    config("diloco", warm_start_steps=10),
  ],
)
def test_a_run_ends_where_the_simulator_ends_it_flush_included(made):
  cluster = cluster_of(made, SLOW.cluster)
  setup = set_up(made, cluster, Options(step_s=SLOW.step_s))
  # The messages that sweeps were planned with.
  costs = LinkCosts(setup.link_costs.cluster, SLOW.transport)
  expected = run_time(costs, setup.work, setup.script.ops(setup.plan))
  times = SLOW.times(made)
  assert times.end_s == expected.now_s
  assert times.utilization == expected.utilization
  assert max(times.at_s) == 60 and times.at_s[60] <= times.end_s
  (first, *_) = times.at_s
  assert times.after(first) == times.at_s[first]
  assert times.after(first - 1) == 0


def test_another_model_may_be_timed():
  clock = clock_of(
    {"name": "x", "cluster": "1gbit", "model": {"preset": "qwen_107b"}}
  )
  timed = clock.timed(config("diloco", sync_interval=20))
  assert timed.model.preset == "qwen_107b" and timed.sync.sync_interval == 20
  with pytest.raises(ValueError, match="did you mean"):
    clock_of({"name": "x", "cluster": "1gbit", "modl": {"preset": "tiny"}})


@pytest.mark.parametrize(
  "entries, message",
  [
    (["1gbit"], r"clocks\[0\]='1gbit' must be a mapping"),
    ([{"name": 3, "cluster": "1gbit"}], r"clocks\[0\]: name=3 must be of type"),
    ([{"name": "x", "cluster": 1}], r"clocks\[0\]: cluster=1 must be of type"),
    (
      [{"name": "x", "cluster": "1gbit"}, {"name": "x", "cluster": "10gbit"}],
      r"clocks\[1\]: another clock is called 'x'",
    ),
  ],
)
def test_a_clock_without_a_name_of_its_own_is_refused(entries, message):
  with pytest.raises(ValueError, match=message):
    clocks_of(entries)
