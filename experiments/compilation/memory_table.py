"""A table of the memory that compiled programs need.

`docs/results/compiled_memory.csv` has a row for every run that `make
compile-report` compiles. A test holds the simulator's memory model to it.
"""

import csv
import io
import json
import pathlib

from dilocox_jax.metrics.lines import write_atomically

COLUMNS = (
  "run",
  "machine",
  "state_bytes",
  "temporaries_bytes",
  "needed_bytes",
  "peak_bytes",
  "memory_bytes",
)


def write(reports: pathlib.Path, table: pathlib.Path) -> None:
  """Writes a table of all reports.

  Args:
    reports: Directory with one directory for every run, of its name.
    table: CSV file to write.
  """
  found = sorted(reports.glob("*/compiled.json"))
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  writer.writerow(COLUMNS)
  writer.writerows(map(_row, found))
  write_atomically(table, text.getvalue())


def _row(report: pathlib.Path) -> tuple[str | int, ...]:
  values = json.loads(report.read_text())
  analysis = values["analysis"]
  memory = analysis["memory"]
  return (
    report.parent.name,
    values["machine"],
    memory["arguments"] + memory["kept"],
    memory["temporaries"],
    analysis["needed_bytes"],
    analysis["peak_bytes"],
    values["memory_bytes"],
  )
