"""The accelerator check runs on a CPU, and compiles for devices not there."""

import json

import jax
import jax.numpy as jnp
import pytest

from dilocox_jax.codecs.named import named_codec
from experiments.tools import accelerator_exact as exact
from experiments.tools import accelerator_figures
from experiments.tools.bench_programs import BOUNDS
from tests.experiments import programs


@pytest.mark.slow
def test_every_figure_is_kept_with_its_bound(tmp_path):
  done = programs.run(
    "tools.accelerator_check", f"--out={tmp_path}", "--minutes=0.1"
  )
  kept = json.loads((tmp_path / "accelerator.json").read_text())
  figures = {row["figure"]: row for row in kept["figures"]}
  assert all(row["ok"] for row in figures.values() if "ok" in row)
  assert figures["inner step tiny"]["tokens_per_s"] > 0
  assert any("delayed round" in name for name in figures)
  assert any("overlap_loco for" in name for name in figures)
  assert not done.returncode and not any("error" in r for r in figures.values())


def test_a_work_directory_that_nothing_reads_is_refused(tmp_path):
  done = programs.run("tools.accelerator_check", f"--workdir={tmp_path}")
  assert done.returncode == 2 and "take --out" in done.one_line


def test_what_fails_is_a_figure_too_and_the_others_follow(tmp_path):
  def broken(sizes):
    yield {"figure": "first"}
    raise RuntimeError("out of memory")

  steps = {"broken": lambda: broken(0), "last": lambda: iter([{"figure": "x"}])}
  rows = []
  path = tmp_path / "kept.json"
  for name, step in steps.items():
    accelerator_figures.run_step(name, step, rows, path)
  kept = json.loads(path.read_text())["figures"]
  assert [row["figure"] for row in kept] == ["first", "broken", "x"]
  assert "out of memory" in kept[1]["error"]


def test_another_result_is_an_error(monkeypatch):
  monkeypatch.setattr(exact, "_RATE", 0.1)
  monkeypatch.setattr(
    exact, "_trained_in_numpy", lambda method, targets: targets[:, 0]
  )
  assert next(exact.errors("plain", 128))[1] > 1e-2


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", BOUNDS)
def test_codecs_are_compiled_for_accelerators(name, platform):
  encoder = named_codec(name).encoder

  def coded(values):
    arrays = encoder.encode([values])
    return encoder.decode(arrays, [values.shape])

  shape = jax.ShapeDtypeStruct((2, 64, 256), jnp.float32)
  exported = jax.export.export(jax.jit(coded), platforms=[platform])(shape)
  assert exported.platforms == (platform,)
