"""What a bench prints and writes, of programs whose times are known."""

import json
import time

import pytest

from experiments.runtime import running
from experiments.tools import bench_programs
from experiments.tools.timing import Ratio
from tests.experiments.programs import run


def test_a_bench_writes_the_ratio_of_what_it_measured_to_the_baseline(
  tmp_path, monkeypatch
):
  now = [0.0]
  monkeypatch.setattr(time, "perf_counter", lambda: now[0])
  monkeypatch.setattr(running, "set_up_jax", lambda: None)

  def takes(duration_s):
    def program():
      now[0] += duration_s

    return program

  ratio = Ratio("made up", takes(6.0), takes(2.0), bound=2.5)
  monkeypatch.setattr(bench_programs, "codec_ratios", lambda: [ratio])
  done = run("tools.bench", "codecs", f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  written = json.loads((tmp_path / "bench_codecs.json").read_text())
  found = written["ratios"]["made up"]
  assert (found["median"], found["measured_s"], found["baseline_s"]) == (
    pytest.approx(3.0),
    pytest.approx(6.0),
    pytest.approx(2.0),
  )
  assert not found["is_within_bound"] and written["repeats"] == 9
  (line,) = [
    x for x in done.stdout.splitlines() if "made up" in x and "2.5" in x
  ]
  assert line.split()[-4:] == ["3", "3", "3", "2.5"]
