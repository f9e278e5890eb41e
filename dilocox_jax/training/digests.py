"""Says by digests whether the files of a checkpoint are still as written."""

import hashlib
import json
import pathlib

from dilocox_jax.checks import json_object

FILE = "digests.json"  # SHA-256 of every file of the checkpoint, by its path.


def seal(checkpoint: pathlib.Path) -> None:
  """Writes the digests of a checkpoint's files, which must all be written."""
  text = json.dumps(_digests(checkpoint), indent=2)
  (checkpoint / FILE).write_text(text)


def damage(checkpoint: pathlib.Path) -> str:
  """Returns what is wrong with a checkpoint's files, or "" if nothing is."""
  try:
    expected = json_object((checkpoint / FILE).read_bytes(), FILE)
    digests = _digests(checkpoint)
  except (OSError, ValueError) as error:
    return f"its files cannot be read ({error})"
  wrong = [path for path in expected if digests.get(path) != expected[path]]
  return f"{wrong[0]} is damaged or missing" if wrong else ""


def _digests(checkpoint: pathlib.Path) -> dict[str, str]:
  """Returns the SHA-256 of every file of a checkpoint, by relative path."""
  digests = {}
  for path in sorted(checkpoint.glob("*/**/*")):
    if path.is_file():
      with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
      digests[path.relative_to(checkpoint).as_posix()] = digest
  return digests
