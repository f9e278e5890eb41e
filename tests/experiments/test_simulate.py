"""The binary, from the command line to its page."""

import contextlib
import json
import pathlib
import re
import shlex

import pytest

from dilocox_jax.report import load_run
from tests.experiments import programs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def simulate(*arguments):
  with contextlib.chdir(ROOT):
    return programs.run("simulate", *arguments)


@pytest.mark.parametrize(("transport", "ways"), [("nccl", 1), ("mailbox", 2)])
def test_the_first_lines_say_what_a_run_is_worth(tmp_path, transport, ways):
  done = simulate(
    f"--transport={transport}",
    *("--config.sync.method=dilocox", "--config.adaptive.mode=off"),
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
  # Eight exchanges of 17.9 GB, each hidden but the last; derived by hand. The
  # other's message comes meanwhile, or out of a store once it is written.
  whole = numbers["whole_run"]
  sync_s = ways * whole["sent_bytes"] / 8 / goodput
  assert whole["exposed_s"] == pytest.approx([sync_s] * 2, rel=0.01)
  assert whole["compute_s"] == pytest.approx([8790] * 2)


def test_the_first_example_of_the_help_fits(tmp_path):
  text = (ROOT / "experiments/simulate.py").read_text().replace("\\\n", " ")
  example = re.search(r"python -m experiments.simulate (.*)", text)
  assert example
  flags = shlex.split(example[1])[1:]
  done = simulate(*flags, f"--workdir={tmp_path}")
  assert " fits: " in done.stdout and "32.4 times" in done.stdout


def test_all_methods_stand_in_one_table_and_their_configs_run(tmp_path):
  links = tmp_path / "ours.json"
  links.write_text(
    '{"name": "ours", "every_site": {"num_devices": 1, "up": "9 Mbit/s", '
    '"down": "9 Mbit/s"}, "sites": [{"name": "Rome"}, {"name": "Oslo"}]}'
  )
  plan = [f"--cluster={links}", "--methods=all", "--memory=1 GB"]
  plan += ["--config.data.batch_size=1", "--config.model.preset=nano"]
  plan += ["--config.sync.sync_interval=16", "--tokens=3000"]
  done = simulate(*plan, f"--workdir={tmp_path / 'all'}")
  assert done.returncode == 0, done.stderr
  lines = done.stdout.partition("ruled out")[0].splitlines()
  speeds = {x.split()[0]: x.split()[1] for x in lines if "x " in x}
  assert speeds.keys() >= {"allreduce", "dilocox", "overlap_loco", "muloco"}
  assert max(map(len, lines)) <= 80 and "0 at Rome, 1 at Oslo" in done.stdout
  assert "default.py:" in done.stdout and "--process_id=N" in done.stdout
  assert "+0.81 ± 0.16 %" in done.stdout and "+6.57" not in done.stdout
  path = tmp_path / "all" / "diloco.json"
  config = f"--config={ROOT / 'experiments/configs/default.py'}:{path}"
  again = simulate(plan[0], config, f"--workdir={tmp_path / 'one'}")
  assert f" {speeds['diloco']}, 2 replicas" in again.stdout
  trained = programs.run(
    "train", config, "--sample_tokens=0", f"--workdir={tmp_path / 'run'}"
  )
  assert trained.returncode == 0, trained.stderr
  # Two replicas see 256 tokens in a step.
  assert load_run(tmp_path / "run").steps == 12
