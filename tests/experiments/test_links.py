import json
import subprocess
import sys
import types

import pytest

from dilocox_jax.simulate.transfer import GLOO
from experiments import links
from experiments.real_links import cases
from experiments.runtime import command_line
from experiments.runtime.command_line import UsageError


def test_a_part_that_fails_leaves_those_before_it(monkeypatch, tmp_path):
  def fails():
    raise RuntimeError("link")

  row = cases.Row("2 x 1 Gbit/s", "permute", 9, 0.5, 0.4, 10, 11.0, 0.2)
  parts = [lambda: {"rows": [row]}, fails]
  monkeypatch.setattr(cases, "calibrated", lambda *_: GLOO)
  monkeypatch.setattr(links, "_parts", lambda *_: parts)
  values = types.SimpleNamespace(
    workdir=str(tmp_path), calibrate=False, cases="all"
  )
  with pytest.raises(RuntimeError, match="link"):
    links.main(values)  # pyright: ignore[reportArgumentType]
  (kept,) = json.loads((tmp_path / "links.json").read_text())
  assert kept["kind"] == "permute"
  assert "| permute |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("wanted", ["all", "ranking"])
def test_times_of_an_earlier_call_are_not_read_again(tmp_path, wanted):
  command_line.writable(str(tmp_path), "links")
  (tmp_path / "open").mkdir()
  (tmp_path / "open" / "run.json").touch()
  values = types.SimpleNamespace(
    workdir=str(tmp_path), calibrate=False, cases=wanted
  )
  with pytest.raises(UsageError, match="open holds a run of an earlier meas"):
    links.main(values)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("namespaces")
def test_links_carry_what_the_plan_counts_no_faster_than_predicted(tmp_path):
  command = [sys.executable, "-m", "experiments.links", "--cases=quick"]
  found = subprocess.run(
    [*command, f"--workdir={tmp_path}"],
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert found.returncode == 0, found.stderr
  rows = json.loads((tmp_path / "links.json").read_text())
  assert [row["kind"] for row in rows] == ["all_reduce", "all_gather"]
  for row in rows:
    assert 1 <= row["link_bytes"] / row["planned_bytes"] <= 1.08
    # Other tests may delay a message; nothing is faster than its link.
    assert row["ratio"] <= 1.25
  transport = json.loads((tmp_path / "transport.json").read_text())
  pair = {kind: factor for kind, factor, _ in transport["factors"]}
  # 1: both directions at once; 2: one after the other. Which of them gloo comes
  # near changes from one hour to the next, so predictions use what is measured.
  assert 0.9 < pair["all_gather"] < 2.5
  assert (
    "| 2 x 100 Mbit/s | all_gather |" in (tmp_path / "report.md").read_text()
  )
