import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_quickstart_compares_three_methods_on_the_clock_of_a_link(tmp_path):
  command = [sys.executable, "-m", "experiments.quickstart", "--steps=60"]
  done = subprocess.run(
    [*command, f"--workdir={tmp_path}"],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  rows = json.loads((tmp_path / "comparison.json").read_text())
  entries = {row["method"]: row for row in rows["runs"]}
  assert set(entries) == {"overlap_loco", "dilocox", "allreduce"}
  assert len({entry["tokens"] for entry in entries.values()}) == 1
  everything = entries.pop("allreduce")
  for entry in entries.values():
    assert entry["total_sent_bytes"] < everything["total_sent_bytes"] / 10
    # 107 billion parameters over 1 Gbit/s.
    assert entry["simulated_s"] < everything["simulated_s"] / 100
  assert (tmp_path / "comparison.png").stat().st_size > 10_000
  assert "comparison:" in done.stdout
