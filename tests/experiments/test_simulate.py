"""The binary, from the command line to its page."""

import contextlib
import json
import pathlib
import runpy
import types
from typing import Any

import pytest

from dilocox_jax.api import simulation_setup as setup
from dilocox_jax.api.method_plans import plan_run
from dilocox_jax.api.simulation_setup import Options
from dilocox_jax.config import from_mapping
from dilocox_jax.simulate.analytic import run_time
from experiments.simulation import run as finished_run
from tests import runs
from tests.experiments import programs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def simulate(*arguments):
  with contextlib.chdir(ROOT):
    return programs.run("simulate", *arguments)


def whole(plan):
  """The outcome of a plan's whole run."""
  made = plan.setup
  return run_time(made.link_costs, made.work, made.script.ops(made.plan))


def test_the_first_lines_say_what_a_run_is_worth(tmp_path):
  done = simulate(
    "--config=experiments/configs/dilocox.py",
    "--cluster=dilocox_107b",
    "--config.model.preset=qwen_107b",
    "--config.exchange.codec=low_rank(rank=2048)+int(bits=4)",
    "--config.sync.sync_interval=125",
    "--config.data.sequence_length=2048",
    "--config.total_steps=1000",
    "--step_s=8.79",
    f"--workdir={tmp_path}",
  )
  assert done.returncode == 0, done.stderr
  assert "speed-up over AllReduce" in done.stdout
  assert "does not fit" in done.stdout  # It is not divided.
  assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
  numbers = json.loads((tmp_path / "simulation.json").read_text())
  # 32,768 tokens a step, and 434 GB of gradients; derived by hand.
  assert numbers["tokens_per_s"] == pytest.approx(3728, rel=1e-3)
  goodput = 125e6 * 1448 / 1514
  allreduce_s = 8.79 + 4 * 108.5e9 / goodput
  assert numbers["speed_up"] == pytest.approx(allreduce_s / 8.79, rel=1e-2)
  # Eight exchanges of 17.9 GB, each hidden but the last; derived by hand.
  sync_s = numbers["sent_bytes"] / 8 / goodput
  assert numbers["exposed_s"] == pytest.approx(sync_s, rel=0.01)
  assert numbers["compute_s"] == pytest.approx(8790)


@pytest.fixture(scope="module", name="all_methods")
def all_methods_fixture(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("all")
  done = simulate(
    "--methods=all",
    "--cluster=100mbit",
    "--tokens=5e6",
    "--memory=1 GB",
    f"--workdir={workdir}",
  )
  assert done.returncode == 0, done.stderr
  return done.stdout, workdir


def test_all_methods_stand_in_one_table(all_methods):
  text, _ = all_methods
  names = [line.split()[0] for line in text.splitlines() if "x " in line]
  assert set(names) >= {"allreduce", "dilocox", "overlap_loco", "muloco"}
  assert max(map(len, text.splitlines()[:-2])) <= 80


def test_a_written_config_is_whole(all_methods):
  _, workdir = all_methods
  path = workdir / "configs" / "diloco.py"
  module: Any = runpy.run_path(str(path))
  config = from_mapping(module["get_config"]().to_dict())
  assert config.total_steps * 2 * config.tokens_per_replica_step >= 5e6
  assert config.mesh.num_data_shards * config.mesh.num_stages <= 8
  assert "--process_id=" in path.read_text()


def test_help_for_clusters_lists_them():
  done = simulate("--cluster=help")
  assert done.returncode == 0
  assert {"1gbit", "consumer", "dtfm_worldwide"} <= {
    line.split()[0] for line in done.stdout.splitlines()
  }


def test_the_example_cluster_is_simulated_with_its_noise_and_outage(tmp_path):
  config = runs.settings(num_replicas=4, method="diloco")
  options = Options(step_s=0.5)
  one = plan_run(config, "experiments/clusters/example.json", options)
  whole_s = whole(one).total_s
  assert whole_s > 21 * 0.5 / 0.8  # The slow site sets the pace.
  text = (ROOT / "experiments/clusters/example.json").read_text()
  values = json.loads(text)
  values["outages"] = [{"site": "Lisbon", "start": "1 s", "stop": "90 s"}]
  (tmp_path / "down.json").write_text(json.dumps(values))
  down = plan_run(config, str(tmp_path / "down.json"), options)
  assert whole(down).total_s > 90 > whole_s


def test_a_run_that_does_not_adapt_takes_the_time_of_its_plan():
  config = runs.settings(method="diloco", warm_start_steps=6)
  made = setup.set_up(config, "1gbit", Options(step_s=0.5))
  none: Any = types.SimpleNamespace(rounds=[])
  expected = run_time(
    made.link_costs, made.work, made.script.ops(made.plan, 12)
  )
  found = finished_run._times(none, config, made)
  assert found[12] == pytest.approx(expected.now_s)


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


ADAPTS = {
  "exchange": {"codec": "low_rank(rank=2)+int"},
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
