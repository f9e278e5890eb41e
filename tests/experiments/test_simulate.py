"""The binary, from the command line to its page."""

import json
import pathlib
import subprocess
import sys
import types
from typing import Any

import pytest

from dilocox_jax.api import simulation_setup as setup
from dilocox_jax.api.simulation_setup import Options
from dilocox_jax.config import from_mapping
from dilocox_jax.plan.pipeline.timeline import Pipeline
from dilocox_jax.simulate.analytic import run_time
from experiments.simulation import page
from experiments.simulation import run as finished_run
from tests import runs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def simulate(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "experiments.simulate", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_a_config_and_a_cluster_make_a_page_and_a_trace(tmp_path):
  done = simulate(
    "--config=experiments/configs/dilocox.py",
    "--cluster=dilocox_107b",
    "--config.model.preset=qwen_107b",
    "--config.codec.rank=2048",
    "--config.sync.sync_interval=125",
    "--config.total_steps=1000",
    "--step_s=8.79",
    f"--workdir={tmp_path}",
  )
  assert done.returncode == 0, done.stderr
  assert "compute utilisation" in done.stdout
  numbers = json.loads((tmp_path / "simulation.json").read_text())
  # Eight exchanges of 17.9 GB, each hidden but the last; derived by hand.
  sync_s = numbers["sent_bytes"] / 8 / (125e6 * 1448 / 1514)
  assert numbers["exposed_s"] == pytest.approx(sync_s, rel=0.01)
  assert numbers["compute_s"] == pytest.approx(8790)
  assert abs(numbers["engine_over_formula"]) < 1e-9
  assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
  assert "![Gantt]" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
  "arguments, said",
  [
    (["--step_s=nan"], "step_s=nan must be seconds, more than 0"),
    (["--step_s=0"], "step_s=0.0 must be seconds, more than 0"),
    (
      ["--step_s=1", "--pipeline=gpipe", "--stages=4", "--micro_batches=2"],
      "--pipeline needs steps without --step_s",
    ),
    (["--cluster=1gbot"], "unknown cluster preset '1gbot'"),
    (["--cluster=nowhere.json"], "nowhere.json"),
    (["--config.mesh.num_replicas=0"], "num_replicas"),
    (["--stages=4"], "--stages needs --pipeline"),
    (
      ["--pipeline=1f1b", "--stages=99", "--micro_batches=4"],
      "num_stages=99 must be at most the 8 devices",
    ),
    (["--pipeline=interleaved"], "chunks_per_stage=1 must be at least 2"),
    (["--step_s=-1"], "step_s"),
    (
      ["--cluster=experiments/clusters/example.json"],
      "set mesh.num_replicas=4",
    ),
  ],
)
def test_bad_input_is_one_line_that_says_what_to_change(
  arguments, said, tmp_path
):
  done = simulate(*arguments, f"--workdir={tmp_path / 'out'}")
  assert done.returncode == 2
  assert said in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1
  assert not (tmp_path / "out").exists()


def test_help_for_clusters_lists_them():
  done = simulate("--cluster=help")
  assert done.returncode == 0
  assert {"1gbit", "consumer", "dtfm_worldwide"} <= {
    line.split()[0] for line in done.stdout.splitlines()
  }


def test_the_example_cluster_is_simulated_with_its_noise_and_outage(tmp_path):
  config = runs.settings(num_replicas=4, method="diloco")
  made = page.prepare(
    config, "experiments/clusters/example.json", Options(step_s=0.5)
  )
  numbers = made.numbers
  assert (
    float(str(numbers["total_s"])) > 21 * 0.5 / 0.8
  )  # The slow site sets the pace.
  text = (ROOT / "experiments/clusters/example.json").read_text()
  values = json.loads(text)
  values["outages"] = [{"site": "Lisbon", "start": "1 s", "stop": "90 s"}]
  (tmp_path / "down.json").write_text(json.dumps(values))
  down = page.prepare(
    config, str(tmp_path / "down.json"), Options(step_s=0.5)
  ).numbers
  assert float(str(down["total_s"])) > 90 > float(str(numbers["total_s"]))


@pytest.mark.parametrize("overlap_steps, is_said", [(3, False), (4, True)])
def test_a_delay_that_hides_nothing_more_is_named(overlap_steps, is_said):
  config = runs.settings(
    method="delayed",
    sync_interval=6,
    num_fragments=2,
    overlap_steps=overlap_steps,
    total_steps=12,
  )
  made = page.prepare(config, "1gbit", Options(step_s=0.5))
  named = [note for note in made.notes if "only delays it" in note]
  assert bool(named) == is_said
  assert not is_said or "as few as 1 steps" in named[0]


def test_operations_give_the_step_time_if_nobody_does():
  config = runs.settings()
  plain = setup.set_up(config, "1gbit", Options())
  assert (plain.work.step_s > 0).all()
  piped = setup.set_up(
    config,
    "1gbit",
    Options(pipeline=Pipeline("1f1b", 4, 8)),
  )
  # Activations of so small a model take longer than its operations.
  assert 3 / 11 < piped.bubble_fraction < 1
  assert (piped.work.step_s > plain.work.step_s).all()


def test_a_runs_own_stages_cost_their_bubble():
  config = runs.settings(
    layout="mesh",
    mesh={"num_stages": 2, "pipeline": "gpipe"},
    inner={"accumulate_steps": 2},
  )
  own = setup.set_up(config, "dilocox_107b", Options())
  asked = Options(pipeline=Pipeline("gpipe", 2, 2))
  same = setup.set_up(runs.settings(), "dilocox_107b", asked)
  assert own.bubble_fraction == same.bubble_fraction > 0
  assert (own.work.step_s == same.work.step_s).all()


def test_a_stated_step_says_nothing_of_its_bubble():
  config = runs.settings(
    layout="mesh",
    mesh={"num_stages": 2, "pipeline": "gpipe"},
    inner={"accumulate_steps": 2},
  )
  made = page.prepare(config, "dilocox_107b", Options(step_s=0.5))
  assert ("pipeline bubble", "-", "derived: ticks") in made.quantities


def test_tokens_are_those_of_the_steps_that_replicas_take():
  config = from_mapping(
    {
      "total_steps": 40,
      "model": {"preset": "nano"},
      "inner": {"warmup_steps": 2},
      "sync": {"method": "diloco", "sync_interval": 20},
      "membership": {"inner_steps": "20,10"},
    }
  )
  made = page.prepare(config, "1gbit", Options(step_s=0.5))
  numbers: Any = made.numbers
  taken = (40 + 20) * config.tokens_per_replica_step
  assert numbers["tokens_per_s"] == pytest.approx(taken / numbers["total_s"])


def test_a_run_that_does_not_adapt_takes_the_time_of_its_plan():
  config = runs.settings(
    method="diloco", warm_start="single", warm_start_steps=6
  )
  made = setup.set_up(config, "1gbit", Options(step_s=0.5))
  # One copy is sent after the warm start; rows say its bytes and no more.
  none: Any = types.SimpleNamespace(rounds=[])
  expected = run_time(
    made.link_costs, made.work, made.script.ops(made.plan, 12)
  )
  found = finished_run._times(none, config, made)
  assert found[12] == pytest.approx(expected.now_s)


def test_a_run_too_large_for_the_engine_is_left_to_the_formula(monkeypatch):
  monkeypatch.setattr(page, "_MOST_NODES", 10)
  made = page.prepare(runs.settings(), "1gbit", Options(step_s=0.5))
  assert not made.trace and not made.bars
  assert any(value == "too large" for _, value, _ in made.quantities)


def test_a_finished_run_is_put_on_the_clock(tmp_path):
  config = runs.settings(method="diloco")
  runs.train(config, tmp_path / "run")
  done = simulate(
    f"--run={tmp_path / 'run'}",
    "--cluster=1gbit",
    "--step_s=0.5",
    f"--workdir={tmp_path / 'out'}",
  )
  assert done.returncode == 0, done.stderr
  rows = json.loads((tmp_path / "out" / "recorded.json").read_text())
  assert [row["step"] for row in rows] == [6, 12, 18, 21]
  made = setup.set_up(config, "1gbit", Options(step_s=0.5))
  expected = run_time(
    made.link_costs, made.work, made.script.ops(made.plan, 18)
  )
  assert rows[2]["simulated_s"] == pytest.approx(expected.now_s)
  kinds = ("evaluation", "final")
  losses = [
    row["outer_loss"]
    for row in runs.rows(tmp_path / "run")
    if row["kind"] in kinds
  ]
  assert [row["outer_loss"] for row in rows] == losses
  assert (tmp_path / "out" / "figures" / "hours.png").exists()
  timed, _ = finished_run.time_run(
    str(tmp_path / "run"), "100mbit", Options(step_s=0.5)
  )
  assert timed.clock == "cluster 100mbit"


def test_a_directory_without_a_run_is_refused(tmp_path):
  done = simulate(f"--run={tmp_path}", f"--workdir={tmp_path / 'out'}")
  assert done.returncode == 2
  assert "is not a run directory" in done.stderr


ADAPTS = {
  "codec": {"name": "low_rank+int", "rank": 2},
  "adaptive": {"mode": "rank"},
}


@pytest.mark.parametrize(
  ("values", "handed_in", "message"),
  [
    (
      ADAPTS | {"sync": {"method": "streaming_diloco"}},
      [],
      "fragments whose ranks adapt",
    ),
    (
      ADAPTS
      | {"sync": {"method": "diloco"}, "membership": {"absences": "1:1-2"}},
      [],
      "replicas that do not all train alike",
    ),
    ({"sync": {"method": "diloco"}}, ["model"], "a model that was handed in"),
  ],
)
def test_a_run_that_rows_do_not_describe_is_refused(
  monkeypatch, values, handed_in, message
):
  run = types.SimpleNamespace(
    config=from_mapping(values).to_mapping(),
    rounds=[None],
    record={"handed_in": handed_in},
  )
  monkeypatch.setattr(finished_run.report, "load_run", lambda workdir: run)
  with pytest.raises(ValueError, match=message):
    finished_run.time_run("runs/x", "1gbit", Options(step_s=0.5))
