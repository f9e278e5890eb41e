"""A data source outside the package: sums of two numbers, as text."""

import dilocox_jax as dx
from dilocox_jax.data.corpus import from_files


def sums(*, validation_fraction: float) -> dx.Corpus:
  """Writes one file for each first number, e.g. "3+4=7"."""
  files = {
    f"{a}.txt": "\n".join(f"{a}+{b}={a + b}" for b in range(100)).encode()
    for a in range(100)
  }
  return from_files("sums", files, validation_fraction)


def register() -> None:
  """Makes "sums" a name for `data.source`."""
  dx.register_source("sums", sums)
