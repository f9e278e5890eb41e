"""The memory estimate beside what compiled programs need."""

import csv
import json
import pathlib

import pytest

from dilocox_jax.api.device_memory import device_memory
from dilocox_jax.config import from_mapping
from experiments.compilation import memory_table
from experiments.configs import compiled

# Read from programs for TPUs (`make compile-report`, libtpu 0.0.42).
TABLE = pathlib.Path(__file__).parents[3] / "docs/results/compiled_memory.csv"
ROWS = {
  row["run"]: row for row in csv.DictReader(TABLE.read_text().splitlines())
}
# Arrays of `tiny` are smaller than the tiles of a chip.
LARGE = [name for name in ROWS if not name.startswith("tiny")]
TOLERANCE = 0.12


def test_the_table_has_the_runs_that_the_makefile_compiles():
  makefile = (TABLE.parents[2] / "Makefile").read_text()
  listed = {name for name in compiled.COMPILED if f" {name}@" in makefile}
  assert set(ROWS) >= listed and len(listed) > 5


@pytest.mark.parametrize("name", LARGE)
def test_the_model_says_what_a_compiled_program_needs(name):
  config = from_mapping(compiled.get_config(name).to_dict())
  found, row = device_memory(config), ROWS[name]
  needed = float(row["needed_bytes"])
  print(f"{name}: {found.total / 2**30:.1f} of {needed / 2**30:.1f} GiB")
  assert found.total == pytest.approx(needed, rel=TOLERANCE)
  assert found.state == pytest.approx(float(row["state_bytes"]), rel=TOLERANCE)


def test_a_table_has_a_row_for_every_report(tmp_path):
  for number, name in enumerate(("b", "a")):
    memory = {"arguments": 7 + number, "kept": 3, "temporaries": 20}
    analysis = {"memory": memory, "needed_bytes": 30, "peak_bytes": 25}
    values = {"machine": "2 x v5e", "memory_bytes": 40, "analysis": analysis}
    (tmp_path / name).mkdir()
    (tmp_path / name / "compiled.json").write_text(json.dumps(values))
  memory_table.write(tmp_path, tmp_path / "table.csv")
  text = (tmp_path / "table.csv").read_text()
  rows = list(csv.reader(text.splitlines()))
  assert rows[0] == list(memory_table.COLUMNS)
  assert rows[1:] == [
    ["a", "2 x v5e", "11", "20", "30", "25", "40"],
    ["b", "2 x v5e", "10", "20", "30", "25", "40"],
  ]
