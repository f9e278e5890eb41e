"""Who ran what: the two files that let a run directory explain itself.

A loss without its config, source revision and corpus digest cannot be compared
with any other, so these are written before the first step and read by every
report. Versions come from the installed packages' metadata: nothing is imported
to ask for its number.
"""

import importlib.metadata
import json
import pathlib
import platform as host
import subprocess
from collections.abc import Mapping
from typing import Any

from dilocox_jax.metrics import lines

CONFIG, RECORD = "config.json", "run.json"
_PACKAGES = ("jax", "flax", "optax", "numpy")


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _git(*arguments: str) -> str:
  package = pathlib.Path(__file__).parent
  command = ["git", "-C", str(package), *arguments]
  done = subprocess.run(
    command, capture_output=True, text=True, timeout=10, check=True
  )
  return done.stdout.strip()


def source_revision() -> str | None:
  """The commit of this source ("-dirty": edited); None outside a checkout."""
  try:
    # An installed copy inside someone else's checkout is not that checkout.
    if _git("rev-parse", "--show-prefix") != "dilocox_jax/metrics/":
      return None
    revision = _git("rev-parse", "--verify", "HEAD")
    edited = _git("status", "--porcelain", "--untracked-files=no")
  except (OSError, subprocess.SubprocessError):
    return None
  return f"{revision}-dirty" if edited else revision


def write_run_record(
  workdir: lines.Directory,
  *,
  config: Mapping[str, Any],
  method: str,
  num_replicas: int,
  parameter_count: int,
  corpus_name: str,
  corpus_digest: str,
  held_out_digest: str,
  platform: str,
  command: str | None = None,
  continues: bool = False,
) -> None:
  """Writes `config.json` and `run.json`: what ran, on what, from what.

  A run that is continued keeps how it was started before, where that was
  otherwise: by another command, on other devices, from other source.

  Args:
    workdir: The run directory; created when missing.
    config: The whole config as nested mappings.
    method: Name of the method.
    num_replicas: M.
    parameter_count: Parameters of one replica (count).
    corpus_name: What people call the training text.
    corpus_digest: Hash of the text; runs compare only when it is equal.
    held_out_digest: Hash of the windows of every evaluation; likewise.
    platform: Backend and devices, as JAX names them.
    command: The command line that started the run, where there was one.
    continues: Whether the run goes on from a checkpoint.

  Raises:
    RecordError: The directory cannot be written.
  """
  workdir = lines.make_directory(workdir)
  lines.write_json(workdir / CONFIG, config)
  versions = {name: _version(name) for name in _PACKAGES}
  start = {
    "command": command,
    "platform": platform,
    "source_revision": source_revision(),
    "versions": {"python": host.python_version(), **versions},
  }
  record = {
    "corpus_digest": corpus_digest,
    "corpus_name": corpus_name,
    "held_out_digest": held_out_digest,
    "method": method,
    "num_replicas": num_replicas,
    "parameter_count": parameter_count,
    **start,
    "earlier_starts": _earlier_starts(workdir, start) if continues else [],
  }
  lines.write_json(workdir / RECORD, record)


def _earlier_starts(
  workdir: pathlib.Path, start: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Every other way in which a run was started before, the first one first."""
  try:
    before = json.loads((workdir / RECORD).read_text())
  except (OSError, ValueError):
    return []  # It explains the run; without it the run still goes on.
  last = {name: before.get(name) for name in start}
  found = []
  for each in (*before.get("earlier_starts", ()), last):
    if each not in (*found, start):
      found.append(each)
  return found
