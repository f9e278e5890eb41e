"""Loads the text of each data source that a config can name.

The default source must be real text that every machine has without a download,
so it is Python's own library. To add a source, write a function that returns a
`Corpus`, add its name to `SOURCES`, and call it in `load_corpus`.
"""

import glob
import itertools
import os
import pathlib
import sysconfig
from collections.abc import Iterator

from dilocox_jax.checks import known
from dilocox_jax.data.corpus import VALIDATION_FRACTION, Corpus, from_files
from dilocox_jax.data.markov import synthetic

SOURCES = ("stdlib", "text_files", "synthetic")

_LEFT_OUT = frozenset(
  # Distributions leave out, move or add these folders. Without them two builds
  # of one version of Python seldom differ.
  "site-packages dist-packages __pycache__ test tests idle_test idlelib"
  " lib2to3 distutils ensurepip tkinter turtledemo"
  # These folders are generated. Code pages are near copies of one another, so
  # training text would have near copies of validation text. The help texts of
  # pydoc would be most of the validation text.
  " encodings pydoc_data".split()
)
# Python's build or installation writes these files for one machine.
_LEFT_OUT_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


def load_corpus(
  source: str,
  *,
  glob: str = "",
  seed: int = 0,
  validation_fraction: float = VALIDATION_FRACTION,
) -> Corpus:
  """Loads a corpus into memory by the name of its source.

  Args:
    source: One of `SOURCES`.
    glob: Pattern of the files; only `text_files` reads it.
    seed: Integer seed of the Markov chain; only `synthetic` reads it.
    validation_fraction: Share of the text held out for validation, above 0 and
      below 1.

  Raises:
    ValueError: If the source is unknown or has too little text.
  """
  known("data source", source, SOURCES)
  if source == "stdlib":
    return stdlib(validation_fraction=validation_fraction)
  if source == "text_files":
    return text_files(glob, validation_fraction=validation_fraction)
  return synthetic(seed, validation_fraction=validation_fraction)


def stdlib(*, validation_fraction: float = VALIDATION_FRACTION) -> Corpus:
  """Reads the library of the Python that is running.

  This is about 8 MB of real text. It differs between versions of Python, and
  so does its digest. Files that cannot be read are skipped.

  Args:
    validation_fraction: Share of the files held out, above 0 and below 1.

  Returns:
    The bytes of the library's modules, without tests, generated tables and
    packages installed later.
  """
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  files = {}
  for path in _library_modules(root):
    try:
      files[path.relative_to(root).as_posix()] = path.read_bytes()
    except OSError:  # Users cannot repair this file, and the others suffice.
      continue
  return from_files("stdlib", files, validation_fraction)


def text_files(
  pattern: str, *, validation_fraction: float = VALIDATION_FRACTION
) -> Corpus:
  """Reads every file that a pattern matches, as bytes.

  Paths in the corpus are relative to the folder before the first wildcard. With
  "/data/texts/**/*.txt" the path of /data/texts/a/b.txt is "a/b.txt". So the
  folder can be moved, and the digest and the split stay the same.

  Args:
    pattern: Glob pattern; `**` stands for folders of any depth.
    validation_fraction: Share of the files held out, above 0 and below 1.

  Raises:
    ValueError: If no file matches, if a file cannot be read, or if training or
      validation has no text.
  """
  pattern = os.path.expanduser(pattern)
  root = _fixed_part(pattern)
  files = {}
  for match in glob.glob(pattern, recursive=True):
    path = pathlib.Path(match)
    if not path.is_file():
      continue
    try:
      files[path.relative_to(root).as_posix()] = path.read_bytes()
    except OSError as error:
      raise ValueError(
        f"cannot read {match} ({error.strerror}): make it readable or narrow"
        f" the glob {pattern!r}"
      ) from error
  if not files:
    raise ValueError(
      f"no file matches the glob {pattern!r}: give a pattern of existing"
      " files, for example 'texts/**/*.txt'"
    )
  return from_files("text_files", files, validation_fraction)


def _library_modules(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the paths of the library's modules that belong to the corpus."""
  for folder, subfolders, names in os.walk(root):
    # Assigning in place keeps os.walk out of the folders that are left out.
    subfolders[:] = (
      s
      for s in subfolders
      if s not in _LEFT_OUT and not s.startswith("config-")
    )
    for name in names:
      if name.endswith(".py") and not name.startswith(_LEFT_OUT_FILES):
        yield pathlib.Path(folder, name)


def _fixed_part(pattern: str) -> pathlib.Path:
  """Returns the folder before a pattern's first wildcard.

  Example: "/data/texts/**/*.txt" gives /data/texts.
  """
  parts = pathlib.Path(pattern).parts
  return pathlib.Path(
    *itertools.takewhile(lambda part: not glob.has_magic(part), parts)
  )
