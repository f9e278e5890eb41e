import csv
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
  with (tmp_path / "comparison.csv").open(newline="") as file:
    entries = {row["run"]: row for row in csv.DictReader(file)}
  assert set(entries) == {"overlap_loco", "dilocox", "allreduce"}
  assert len({entry["tokens"] for entry in entries.values()}) == 1
  everything = entries.pop("allreduce")
  (clock,) = (key for key in everything if key.startswith("seconds:"))
  for entry in entries.values():
    for key, fewer in (("sent_bytes", 10), (clock, 100)):
      # 107 billion parameters over 1 Gbit/s.
      assert float(entry[key]) < float(everything[key]) / fewer
  assert (tmp_path / "comparison.png").stat().st_size > 10_000
  assert "comparison:" in done.stdout
