"""Runs are compiled for TPUs that are not there, and a page says the rest."""

import json
import pathlib
import subprocess
import sys

import pytest

from dilocox_jax.config import from_mapping
from experiments.compilation.topology import is_compiler_installed
from experiments.configs import compiled

ROOT = pathlib.Path(__file__).resolve().parents[2]
NO_COMPILER = "needs the compiler for TPUs: make compile-report installs it"
needs_compiler = pytest.mark.skipif(
  not is_compiler_installed(), reason=NO_COMPILER
)
TINY = "--config=experiments/configs/compiled.py:tiny_{}"


def report(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "experiments.compile_report", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=600,
  )


def one_line(done):
  (line,) = done.stderr.strip().splitlines()
  return line


@pytest.mark.skipif(is_compiler_installed(), reason="the compiler is there")
def test_without_the_compiler_one_line_says_how_to_get_it(tmp_path):
  done = report(TINY.format("dilocox"), f"--workdir={tmp_path}")
  assert done.returncode == 2
  assert "make compile-report" in one_line(done)


@needs_compiler
def test_an_unknown_topology_is_one_line(tmp_path):
  done = report(
    TINY.format("dilocox"), f"--workdir={tmp_path}", "--topology=v5e:3x17"
  )
  assert done.returncode == 2
  assert "--topology=v5e:3x17" in one_line(done)


@needs_compiler
def test_a_mesh_that_does_not_fill_the_slices_is_one_line(tmp_path):
  done = report(
    TINY.format("dilocox"), f"--workdir={tmp_path}", "--topology=v5e:2x4"
  )
  assert done.returncode == 2
  assert "the run has 8 devices and the slices have 16" in one_line(done)


@needs_compiler
def test_a_model_that_cannot_fit_is_one_line(tmp_path):
  done = report(
    TINY.format("delayed"),
    f"--workdir={tmp_path}",
    "--topology=v5e:2x2",
    "--config.model.vocab_size=4000000",
  )
  assert done.returncode in (1, 2)
  assert "not fit" in one_line(done)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
  "name, stretches", [("delayed", 1), ("dilocox", 2), ("diloco", 0)]
)
def test_a_page_tells_what_a_tiny_run_needs(name, stretches, tmp_path):
  done = report(
    TINY.format(name), f"--workdir={tmp_path}", "--topology=v5e:2x2"
  )
  assert done.returncode == 0, done.stderr
  found = json.loads((tmp_path / "compiled.json").read_text())
  assert found["fits"]
  analysis = found["analysis"]
  inside = analysis["product_flops"] - analysis["exchange_flops"]
  assert inside == pytest.approx(analysis["model_flops"], rel=0.01)
  # A tile of 1024 values is the least that a chip sends.
  assert 1 <= analysis["sent_bytes"] / analysis["planned_bytes"] < 1.03
  behind = [tuple(each["hidden_by"]) for each in analysis["transfers"]]
  assert len(set(behind) - {()}) == stretches
  assert all(behind) == bool(stretches)
  page = (tmp_path / "report.md").read_text()
  for title in ("Memory", "Products", "Collectives", "Transfers"):
    assert f"## {title}" in page
  assert (tmp_path / "figures" / "timeline.png").stat().st_size > 0


@pytest.mark.parametrize("name", compiled.COMPILED)
def test_every_run_to_compile_fills_two_slices(name):
  config = from_mapping(compiled.get_config(name).to_dict())
  devices = config.mesh.num_replicas * config.division.num_devices
  assert devices in (2 * 4, 2 * 16, 2 * 128)


def test_a_run_that_does_not_exist_is_refused():
  with pytest.raises(ValueError, match="'huge' must be one of tiny_delayed"):
    compiled.get_config("huge")
