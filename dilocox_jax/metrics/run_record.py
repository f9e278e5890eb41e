"""Writes the two files that say what was run: config.json and run.json.

A loss can only be compared with another one if its config, source revision and
corpus digest are known. So they are written before the first step, and every
report reads them. Versions come from the metadata of installed packages, so no
package is imported for its version.
"""

import importlib.metadata
import pathlib
import platform as host
import subprocess
from collections.abc import Mapping
from typing import Any

from dilocox_jax.checks import json_object
from dilocox_jax.metrics import lines

CONFIG, RECORD = "config.json", "run.json"
_PACKAGES = ("jax", "flax", "optax", "numpy")


def _git(*arguments: str) -> str:
  package = pathlib.Path(__file__).parent
  command = ["git", "-C", str(package), *arguments]
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=10, check=True
  )
  return done.stdout.strip()


def source_revision() -> str | None:
  """Returns the commit of this source, or None outside a checkout.

  It ends with "-dirty" if tracked files were edited.
  """
  try:
    # An installed copy may lie inside the checkout of another project, for
    # example in its virtual environment. That commit is not ours.
    if _git("rev-parse", "--show-prefix") != "dilocox_jax/metrics/":
      return None
    revision = _git("rev-parse", "--verify", "HEAD")
    edited = _git("status", "--porcelain", "--untracked-files=no")
  except (OSError, subprocess.SubprocessError):
    return None
  return f"{revision}-dirty" if edited else revision


def write_run_record(
  workdir: lines.Directory,
  config: Mapping[str, Any],
  run: Mapping[str, Any],
  start: Mapping[str, Any],
  continues: bool = False,
) -> None:
  """Writes `config.json` and `run.json`.

  The record of a continued run lists its earlier starts if they differ: by
  another command, on other devices, or from other source.

  Args:
    workdir: Run directory; created if missing.
    config: Whole config as nested mappings.
    run: What is trained, on what. Runs can be compared only if corpus_digest
      and held_out_digest are equal: hashes of the training text and of the
      sequences of every evaluation.
    start: How this program trains it: command, platform, and the values that
      the config left to the devices (chosen_for_device).
    continues: Whether the run continues from a checkpoint.

  Raises:
    RecordError: If the directory cannot be written.
  """
  workdir = lines.make_directory(workdir)
  lines.write_json(workdir / CONFIG, config)
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  start = {
    **start,
    "source_revision": source_revision(),
    "versions": {"python": host.python_version(), **versions},
  }
  earlier = _earlier_starts(workdir, start) if continues else []
  lines.write_json(
    workdir / RECORD, {**run, **start, "earlier_starts": earlier}
  )


def _earlier_starts(
  workdir: pathlib.Path, start: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Lists the earlier starts that differ from this one, the oldest first."""
  try:
    before = json_object((workdir / RECORD).read_bytes(), RECORD)
  except (OSError, ValueError):
    return []  # A run without its old record can still continue.
  last = {name: before.get(name) for name in start}
  starts = []
  for earlier in (*before.get("earlier_starts", ()), last):
    if earlier not in (*starts, start):
      starts.append(earlier)
  return starts
