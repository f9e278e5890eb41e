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
from collections.abc import Mapping, Sequence
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
  *,
  config: Mapping[str, Any],
  method: str,
  num_replicas: int,
  parameter_count: int,
  corpus_name: str,
  corpus_digest: str,
  held_out_digest: str,
  platform: str,
  bytes_per_token: float | None = None,
  handed_in: Sequence[str] = (),
  chosen: Mapping[str, Any] | None = None,
  command: str | None = None,
  clock: str = "",
  clock_digest: str = "",
  continues: bool = False,
) -> None:
  """Writes `config.json` and `run.json`.

  The record of a continued run lists its earlier starts if they differ: by
  another command, on other devices, or from other source.

  Args:
    workdir: Run directory; created if missing.
    config: Whole config as nested mappings.
    method: Name of the method.
    num_replicas: Number of replicas, M.
    parameter_count: Number of parameters of one replica.
    corpus_name: Name of the training text.
    corpus_digest: Hash of the training text. Runs can be compared only if it
      is equal.
    held_out_digest: Hash of the sequences of every evaluation. Runs can be
      compared only if it is equal.
    platform: Backend and devices, as JAX names them.
    bytes_per_token: Bytes of a token of the validation text, if it has any.
    handed_in: Names of the parts, such as "model", that the caller handed in
      instead of naming them in the config.
    chosen: Values that the config left to the devices, by dotted names.
    command: Command line that started the run; None if there was none.
    clock: What the run's simulated clock times; "" without a clock.
    clock_digest: Digest of the cluster and of the durations behind it.
    continues: Whether the run continues from a checkpoint.

  Raises:
    RecordError: If the directory cannot be written.
  """
  workdir = lines.make_directory(workdir)
  lines.write_json(workdir / CONFIG, config)
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  start = {
    "chosen_for_device": dict(chosen or {}),
    "command": command,
    "platform": platform,
    "source_revision": source_revision(),
    "versions": {"python": host.python_version(), **versions},
  }
  record = {
    "bytes_per_token": bytes_per_token,
    "corpus_digest": corpus_digest,
    "corpus_name": corpus_name,
    "held_out_digest": held_out_digest,
    "method": method,
    "num_replicas": num_replicas,
    "parameter_count": parameter_count,
    **({"handed_in": list(handed_in)} if handed_in else {}),
    **({"clock": clock, "clock_digest": clock_digest} if clock else {}),
    **start,
    "earlier_starts": _earlier_starts(workdir, start) if continues else [],
  }
  lines.write_json(workdir / RECORD, record)


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
