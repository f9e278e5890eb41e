"""What a bench leaves behind: a file for programs, a table for people."""

import pathlib
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from dilocox_jax.metrics.lines import write_json


def keep_record(
  workdir: pathlib.Path,
  name: str,
  record: Mapping[str, Any],
  table: Table,
  console: Console | None = None,
) -> pathlib.Path:
  """Writes bench_NAME.json, shows the table and says where the file is.

  Args:
    workdir: Where the file goes.
    name: Of the bench.
    record: All that was found, labelled.
    table: The same for people.
    console: Where the table goes; the terminal by default.

  Returns:
    The path of the file.

  Raises:
    RecordError: The disk refused.
  """
  path = workdir / f"bench_{name}.json"
  write_json(path, record)
  (console or Console()).print(table)
  print(f"results: {path}")
  return path
