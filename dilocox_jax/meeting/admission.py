"""`run.json` says what a run is; a newcomer that differs is refused itself.

The replica that comes first writes it, and nobody changes it afterwards.
"""

import functools
import hashlib
import importlib.metadata
import pathlib
import platform
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import dilocox_jax
from dilocox_jax.meeting.paths import RUN
from dilocox_jax.meeting.seal import JSON_BYTES, Seal

_VERSIONED = ("jax", "jaxlib", "numpy")
# What a user may vouch for, with what to do otherwise.
_VERSION_ADVICE = "install the same, or accept it if it computes the same"


class DiffersError(ValueError):
  """Means that a replica must not take part. The message is one line."""


def run_terms(
  config: Mapping[str, Any], text_digest: str, rules: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns what must be equal in all replicas.

  Args:
    config: All that a run's result depends on, as nested mappings of JSON. What
      may differ (devices, folders, the pace) is left out.
    text_digest: Digest of the training text.
    rules: The rules of the exchange.
  """
  return {
    "config": dict(config),
    "rules": dict(rules),
    "text": text_digest,
    "code": _own_code_digest(),
    "versions": {
      "python": ".".join(platform.python_version_tuple()[:2]),
      **{name: importlib.metadata.version(name) for name in _VERSIONED},
    },
  }


@functools.cache  # What runs was read when the program began.
def _own_code_digest() -> str:
  return code_digest(pathlib.Path(dilocox_jax.__file__).parent)


def code_digest(package: pathlib.Path) -> str:
  """Returns a digest of the paths and texts of a package's Python files."""
  digest = hashlib.sha256()
  for file in sorted(package.rglob("*.py")):
    text = hashlib.sha256(file.read_bytes()).hexdigest()
    digest.update(f"{file.relative_to(package).as_posix()} {text}\n".encode())
  return digest.hexdigest()


def admitted(
  store: Any,
  secret: bytes,
  terms: Mapping[str, Any],
  *,
  where: str,
  accept_version: bool = False,
) -> str:
  """Writes `run.json`, or compares this replica with it.

  Args:
    store: A `Patient` store.
    secret: The shared secret.
    terms: See `run_terms`.
    where: The store's name, for messages.
    accept_version: Whether other code and versions are let in.

  Returns:
    What tells this run from every other one, for its seal.

  Raises:
    DiffersError: If this replica differs, or does not have the secret.
  """
  seal = Seal(secret, "")
  record = dict(terms) | {"id": secrets.token_hex(16)}
  store.create(RUN, seal.closed_json(RUN, record))
  found = seal.opened_json(RUN, store.get(RUN, JSON_BYTES))
  if found is None:
    raise DiffersError(
      f"{RUN} at {where} is not sealed with this secret: take the secret of"
      " that run, or another place for a new run"
    )
  for field, ours, theirs in _differences(terms, found):
    is_version = field.partition(".")[0] in ("code", "versions")
    if not (is_version and accept_version):
      advice = _VERSION_ADVICE if is_version else "take the run's value"
      raise DiffersError(
        f"{field} is {_short(ours)} here and {_short(theirs)} in the run at"
        f" {where}: {advice}"
      )
  return str(found["id"])


def _differences(
  ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
  """Yields the fields that differ, by dotted names."""
  for name in dict.fromkeys([*ours, *theirs]):
    if prefix + name == "id":
      continue
    one, other = ours.get(name), theirs.get(name)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
      yield from _differences(one, other, f"{prefix}{name}.")
    elif _plain(one) != _plain(other):
      yield prefix + name, one, other


def _plain(value: Any) -> Any:
  """Returns a value as JSON gives it back."""
  return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _short(value: Any) -> str:
  """Returns a value for a message; of a digest the first characters."""
  is_digest = isinstance(value, str) and len(value) == 64
  return f"{value[:8]}..." if is_digest else repr(value)
