"""The secret that the replicas of a run share: a file that its owner reads."""

import os
import pathlib
import secrets
import stat

from dilocox_jax.files import replaced

_BYTES = 32


def write_secret(path: str | os.PathLike[str]) -> None:
  """Writes a new secret, a line of 64 characters, to a file of mode 0600.

  Raises:
    ValueError: If the file exists. The message is one line.
    OSError: If the system refuses.
  """
  path = pathlib.Path(path)
  if os.path.lexists(path):
    raise ValueError(f"{path} exists: a run would lose its secret; delete it")
  path.parent.mkdir(parents=True, exist_ok=True)
  with replaced(path) as file:
    os.fchmod(file.fileno(), stat.S_IRUSR | stat.S_IWUSR)
    file.write(secrets.token_hex(_BYTES).encode() + b"\n")


def read_secret(path: str | os.PathLike[str]) -> bytes:
  """Returns the secret in a file.

  Raises:
    ValueError: If others may read the file, or it holds no secret. The message
      is one line.
    OSError: If it cannot be read.
  """
  with open(path, "rb") as file:
    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
      raise ValueError(
        f"{path} may be read by others (mode {mode:04o}): chmod 600 {path}"
      )
    text = file.read(2**16).strip()
  if len(text) < 2 * _BYTES:
    raise ValueError(
      f"{path} holds no secret of {2 * _BYTES} characters or more: make one"
      " with `python -m experiments.make_secret`"
    )
  return text
