import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_quickstart_compares_two_methods_at_one_budget(tmp_path):
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
  assert set(entries) == {"dilocox", "allreduce"}
  assert entries["dilocox"]["tokens"] == entries["allreduce"]["tokens"]
  assert (
    entries["dilocox"]["total_sent_bytes"]
    < entries["allreduce"]["total_sent_bytes"] / 10
  )
  assert (tmp_path / "comparison.png").stat().st_size > 10_000
  assert "comparison:" in done.stdout
