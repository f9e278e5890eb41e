"""Programs that read runs: sample, export, compare, simulate, secrets."""

import csv
import subprocess
import sys
from typing import Any

import pytest

from dilocox_jax.codecs.named import CODECS
from dilocox_jax.mailbox_protocol.roster import read_secret
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.report import write_report
from dilocox_jax.training import start
from dilocox_jax.training.checkpoint import RefusedError
from experiments.runtime import running, samples
from tests import runs
from tests.experiments.programs import run
from tests.report.conftest import write_run


@pytest.fixture(scope="module", name="trained")
def trained_fixture(tmp_path_factory):
  folder = tmp_path_factory.mktemp("texts")
  for number in range(40):
    (folder / f"{number}.txt").write_text("abcd" * 40 + str(number))
  workdir = tmp_path_factory.mktemp("run")
  text = {"source": "text_files", "glob": f"{folder}/*.txt"}
  runs.train(runs.settings(data=text, total_steps=6), workdir)
  return workdir


def builder(shape, *, dtype, unroll, attention, remat):
  """A builder as the guide has it, without any default."""
  assert (unroll, attention, remat) == (1, "plain", "none")
  assert dtype.name == "float32"
  return build_model(shape, dtype=dtype)


def test_a_sample_continues_the_prompt_and_stands_in_the_report(
  trained, monkeypatch
):
  monkeypatch.setattr(ModelShape, "builder", builder)
  assert "## A sample" not in write_report(trained).read_text()
  flags = f"--run={trained}", "--prompt=abc", "--num_tokens=7"
  done = run("sample", *flags, "--temperature=0")
  assert done.returncode == 0 and done.stdout.startswith("abc"), done.stderr
  assert "    abc" in (trained / "report.md").read_text()


def test_without_a_prompt_the_validation_text_is_continued(trained):
  done = run("sample", f"--run={trained}", "--num_tokens=3")
  assert "abcdabcd" in done.stdout
  done = run("sample", f"--run={trained}", "--prompt=")
  assert done.returncode == 2 and "prompt is empty" in done.one_line


@pytest.mark.slow
def test_a_run_starts_from_what_another_one_exported(trained, tmp_path):
  pytest.importorskip("safetensors", reason="needs the extra `weights`")
  limit = "--max_file_bytes=20000"
  done = run("export", f"--run={trained}", f"--workdir={tmp_path}", limit)
  assert done.returncode == 0 and "12,624 parameters" in done.stdout
  assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
  source = {"init_from": str(tmp_path)}
  config = runs.settings(num_replicas=3, checkpoint=source)
  state: Any = start.first_state(config, runs.programs(config), "rounds")
  old, _ = runs.saved(trained)
  runs.assert_same_bits(state.fragments[0].params, old.fragments[0].params)
  config = runs.settings(model={"ff_dim": 32}, checkpoint=source)
  with pytest.raises(RefusedError, match="set --config.model.ff_dim=24$"):
    start.first_state(config, runs.programs(config), "rounds")


@pytest.mark.slow
def test_a_program_that_reads_a_run_is_told_its_parts(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(CODECS, "ternary", CODECS["int"])  # Forgotten again.
  del CODECS["ternary"]
  file = tmp_path / "mine.py"
  folder = tmp_path / "run"
  file.write_text("from tests.extensions import ternary\nternary.register()\n")
  exec(file.read_text())
  exchange = {"codec": "ternary"}
  made = runs.settings(exchange=exchange, total_steps=6, method="diloco")
  runs.train(made, folder)
  # The synthetic text has no words.
  for more, word in ([], "'ternary'"), ([f"--parts={file}"], "no tokenizer"):
    module = [sys.executable, "-m", "experiments.sample", f"--run={folder}"]
    done = subprocess.run([*module, *more], capture_output=True, text=True)
    assert done.returncode == 2 and word in done.stderr
  running._sample(folder, 5)
  assert "no sample" in capsys.readouterr().out


def test_runs_side_by_side_make_a_table_and_a_page(tmp_path):
  paths = [
    write_run(tmp_path / "a", method="allreduce"),
    write_run(tmp_path / "b", floor=2.0),
  ]
  done = run("compare", *paths, f"--workdir={tmp_path / 'out'}")
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert "28.6x" in done.stdout and max(map(len, lines[:-1])) <= 80
  page = tmp_path / "out" / "report.md"
  assert lines[-1] == f"comparison: {page}"
  assert f"experiments.compare {paths[0]}" in page.read_text()
  other = write_run(tmp_path / "c", digest="bbbb")
  done = run("compare", paths[0], other, f"--workdir={tmp_path / 'new'}")
  assert done.returncode == 2 and "different corpora" in done.one_line
  assert not (tmp_path / "new").exists()


def test_a_secret_is_made_once_and_can_be_read(tmp_path):
  file = tmp_path / "new" / "run.secret"
  assert run("make_secret", f"--file={file}").returncode == 0
  secret = read_secret(file)
  again = run("make_secret", f"--file={file}")
  assert again.returncode == 2 and "exists" in again.one_line
  assert read_secret(file) == secret


@pytest.mark.slow
def test_the_quick_start_compares_three_methods_on_the_clock_of_a_link(
  tmp_path,
):
  done = run("quickstart", "--steps=60", f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  with (tmp_path / "table.csv").open(newline="") as file:
    entries = {row["run"]: row for row in csv.DictReader(file)}
  assert len({entry["tokens"] for entry in entries.values()}) == 1
  everything = entries.pop("allreduce")
  (clock,) = (key for key in everything if key.startswith("seconds:"))
  assert set(entries) == {"overlap_loco", "dilocox"}
  for entry in entries.values():
    for key, fewer in (("sent_bytes", 10), (clock, 100)):
      # 107 billion parameters over 1 Gbit/s.
      assert float(entry[key]) < float(everything[key]) / fewer


def test_what_a_model_wrote_moves_no_cursor(capsys):
  text = "def f():\n\treturn\x1b[31m 1\r\n"
  samples.print_sample(text)
  assert capsys.readouterr().out == "def f():\n\treturn\\x1b[31m 1\n"
