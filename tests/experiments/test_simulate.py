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
    "--config.sync.method=dilocox",
    "--config.adaptive.mode=off",
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


LINKS = (
  '{"name": "ours", "every_site": {"num_devices": DEVICES, PEAK'
  '"up": "RATE Mbit/s", "down": "RATE Mbit/s", "rtt": "30 ms"}, '
  '"sites": [{"name": "Rome"}, {"name": "Oslo"}]}'
)


def links(folder, rate, devices=1, peak=""):
  path = folder / "ours.json"
  text = LINKS.replace("RATE", f"{rate}").replace("DEVICES", f"{devices}")
  path.write_text(text.replace("PEAK", peak))
  return f"--cluster={path}"


NANO = ("--config.data.batch_size=1", "--config.model.preset=nano")


def cells(text):
  """The words of each row of the table, by method."""
  table = re.findall(r"^ (\w+(?: bf16)?) {2,}(.*x .*) $", text, re.MULTILINE)
  return {name: rest for name, rest in table}


def test_all_methods_stand_in_one_table_and_their_configs_run(tmp_path):
  plan = [links(tmp_path, 9), "--methods=all", "--memory=1 GB", *NANO]
  # With 200 steps, rounds of 25 steps leave the run eight rounds.
  done = simulate(*plan, "--tokens=51200", f"--workdir={tmp_path / 'all'}")
  assert done.returncode == 0, done.stderr
  rows = cells(done.stdout)
  assert rows.keys() >= {"allreduce", "allreduce bf16", "dilocox", "muloco"}
  # The expected gaps; cocktail_sgd, which has no rounds, has its measured gap.
  assert re.match(r"\+\d+\.\d % ", rows["muloco"])
  assert rows["cocktail_sgd"].startswith("+37.9 % ")
  assert rows["allreduce bf16"].startswith("not known")
  printed = done.stdout.partition("  python -m")[0].splitlines()
  assert max(map(len, printed)) <= 80 and "0 at Rome, 1 at Oslo" in done.stdout
  assert "default.py:" in done.stdout and "--process_id=N" in done.stdout
  page = (tmp_path / "all/report.md").read_text()
  # The page has the measured gaps, too.
  assert "| +2.91 ± 0.11 % M=2 |" in page and "| not measured |" in page
  assert "| +1.95 ± 0.10 % M=2 |" in page
  assert "| tokens a\N{NO-BREAK SPACE}second |" in page
  for said in (page, " ".join(done.stdout.split())):
    assert (
      "Ranked by the loss at equal time beside AllReduce's, at worst" in said
    )
    assert "(extrapolated from the size of the model; give --losses" in said
    assert "reach 40 % of a device's peak" in said
    assert "AllReduce sends gradients in float32" in said
  (tokens,) = re.findall(r"\| muloco \|(?:[^|]*\|){4} ([\d.,]+ ?M?) \|", page)
  path = tmp_path / "all" / "muloco.json"
  config = f"--config={ROOT / 'experiments/configs/default.py'}:{path}"
  again = simulate(plan[0], config, f"--workdir={tmp_path / 'one'}")
  assert f" {tokens}, 2 replicas" in again.stdout
  assert "reach 40 % of a device's peak" in " ".join(again.stdout.split())
  trained = programs.run(
    "train", config, "--sample_tokens=0", f"--workdir={tmp_path / 'run'}"
  )
  assert trained.returncode == 0, trained.stderr
  # Two replicas see 256 tokens in a step.
  assert load_run(tmp_path / "run").steps == 200


def test_seven_billion_on_two_clusters_get_a_small_gap_and_room(tmp_path):
  """Two sites of eight devices of 80 GB, joined by 500 Mbit/s."""
  peak = '"peak": "989 TFLOP/s", "memory": "80 GB", '
  sizes = {
    "num_layers": 32,
    "model_dim": 4096,
    "num_heads": 32,
    "ff_dim": 11008,
    "vocab_size": 32000,
  }
  done = simulate(
    "--methods=all",
    links(tmp_path, 500, 8, peak),
    *(f"--config.model.{name}={size}" for name, size in sizes.items()),
    "--config.data.batch_size=256",
    "--config.data.sequence_length=4096",
    f"--workdir={tmp_path / 'out'}",
  )
  assert done.returncode == 0, done.stderr
  said = " ".join(done.stdout.split())
  (method,) = re.findall(r"default.py:\S+/(\w+).json", said)
  assert f"Recommended: {method} with H = 16. Its expected gap: +" in said
  gap, _, *_, spare, _ = cells(done.stdout)[method].split()
  gap = cells(done.stdout)[method].split()[0]
  assert float(gap) < 2 and float(spare) >= 10
  assert "Its exchanges hide behind inner steps." in said
  # The gaps that are printed are of the method that is recommended.
  after = said.partition("Its measured gaps: ")[2]
  assert after.startswith("+1.95 ± 0.10 % (2 x 4, H = 16, muon, an average")
  assert "+1.99 ± 0.25 %" in after and "+6.57" not in said


def test_losses_of_the_user_are_what_gaps_follow_from(tmp_path):
  done = simulate(
    "--methods=all",
    "--losses=2,1.9",
    links(tmp_path, 9),
    *NANO,
    f"--workdir={tmp_path / 'out'}",
  )
  assert done.returncode == 0, done.stderr
  said = " ".join(done.stdout.split())
  assert "batch doubles: 5 % (2.5 to 7.5) (from --losses)" in said


def test_losses_without_all_methods_are_refused(tmp_path):
  done = simulate("--losses=2,1.9", f"--workdir={tmp_path / 'out'}")
  assert done.returncode == 2
  assert "--losses needs --methods=all: else nothing reads it" in done.one_line
  done = simulate(
    "--methods=all", "--losses=1.9,2", f"--workdir={tmp_path / 'out'}"
  )
  assert done.returncode == 2
  assert "give the loss with half of the batch first" in done.one_line


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (
      ["--memory=1 kB"],
      "No method leaves 10 % of a device's memory to spare: ",
    ),
    (["--memory=1 GB"], "as the method waits for each exchange."),
    (
      ["--memory=1 GB", "--config.sync.sync_interval=77"],
      "was measured with H = 77.",
    ),
    ([], "The memory of a device is not known: --memory would say it."),
  ],
)
def test_what_is_not_known_or_does_not_fit_is_said(flags, said, tmp_path):
  slow = "0.01" if "--config" not in str(flags) else "9"
  out = f"--workdir={tmp_path / 'out'}"
  done = simulate("--methods=all", links(tmp_path, slow), *NANO, *flags, out)
  assert done.returncode == 0, done.stderr
  assert said in " ".join(done.stdout.split())
  is_recommended = "experiments.train" in done.stdout
  assert is_recommended == ("1 kB" not in str(flags))
