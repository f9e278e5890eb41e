"""The part of a run's page with the expected gap."""

import dataclasses
import json

import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.gap.expected import expected_gap
from dilocox_jax.gap.gain import gain_of_size
from dilocox_jax.gap.law import Estimate
from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.report import load_run, write_report
from dilocox_jax.report.expected_gap import section

VALUES = {
  "sync.method": "muloco",
  "sync.sync_interval": 30,
  "mesh.num_replicas": 4,
  "total_steps": 600,
}


@pytest.fixture(name="finished")
def finished_fixture(write_run, tmp_path):
  """Returns a run of a config, read from a directory."""

  def finished(**changes):
    run = load_run(write_run(tmp_path / "run"))
    config = from_mapping(VALUES | changes).to_mapping()
    return dataclasses.replace(run, config=config)

  return finished


def cells(run):
  (lines,) = section(run).values()
  rows = [line.strip("| ").split(" | ") for line in lines if line[:1] == "|"]
  return {row[0]: row[1:] for row in rows}, " ".join(lines)


def test_the_expected_gap_stands_beside_the_loss(finished):
  run = finished()
  rows, text = cells(run)
  expected = expected_gap(
    gain=gain_of_size(871_168),
    num_replicas=4,
    sync_interval=30,
    method="muloco",
    steps=600,
  )
  assert rows["gap to AllReduce"][0] == f"{100 * expected.gap:+.1f} %"
  loss = run.validation_loss
  assert rows["loss of this run"][0] == f"{loss:.4f}"
  assert rows["loss of AllReduce"][0] == f"{loss / (1 + expected.gap):.4f}"
  # s of 35 million parameters, 2.2 %, times the third root of 40.2.
  assert (
    rows["s"][0] == "7.5 %" and rows["s"][2] == "extrapolated from the size"
  )
  assert "`experiments.gap` measures s" in text


def test_a_measured_s_in_the_directory_counts(finished):
  run = finished()
  gain = Estimate(0.05, 0.04, 0.06)
  path = run.workdir / "gap.json"
  content = {"gain": dataclasses.asdict(gain), "parameters": 871_168}
  path.write_text(json.dumps(content))
  rows, text = cells(run)
  assert rows["s"] == ["5.0 %", "4.0 to 6.0 %", "measured"]
  assert "`experiments.gap` measures s" not in text
  path.write_text(json.dumps(content | {"parameters": 5}))
  with pytest.raises(RecordError, match="its model has 5 parameters, and this"):
    section(run)
  no_share = {"value": 1.0, "low": 0.04, "high": 1.5}
  path.write_text(json.dumps(content | {"gain": no_share}))
  with pytest.raises(RecordError, match="gap.json is damaged: value=1.0 must"):
    section(run)
  path.write_text('{"gain": {"value": 0.1}}')
  with pytest.raises(RecordError, match="gap.json is damaged: low=None must"):
    section(run)


def test_a_run_without_a_gap_has_no_such_part(finished):
  assert not section(finished(**{"mesh.num_replicas": 1}))
  allreduce = {"sync.method": "allreduce", "sync.sync_interval": None}
  assert not section(finished(**allreduce))
  run = finished()
  assert not section(dataclasses.replace(run, finished=False))
  other = {"sync": {"method": "of_a_stranger"}}
  assert not section(dataclasses.replace(run, config=other))


def test_the_page_has_the_part(write_run, tmp_path):
  path = write_run(tmp_path / "run")
  config = from_mapping(VALUES).to_mapping()
  (path / "config.json").write_text(json.dumps(config))
  text = write_report(path).read_text()
  assert text.index("## Results") < text.index("## Beside AllReduce")
  assert "| gap to AllReduce | +" in text
