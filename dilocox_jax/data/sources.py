"""The names a config can ask for, and where each of them finds its text.

The default has to be real text that is there on every machine, without a
download; Python's own library is. A new source is one more function that
ends in a `Corpus`, and a line in `load`.
"""

import glob
import itertools
import os
import pathlib
import sysconfig
from collections.abc import Iterator

from dilocox_jax.data.corpus import VALIDATION_FRACTION, Corpus, from_files
from dilocox_jax.data.markov import synthetic

SOURCES = ("stdlib", "text_files", "synthetic")

_LEFT_OUT = frozenset(
  # What distributions leave out, move or add, so that two builds of one
  # version of Python seldom differ.
  "site-packages dist-packages __pycache__ test tests idle_test idlelib"
  " lib2to3 distutils ensurepip tkinter turtledemo"
  # What is generated: code pages are near copies of one another and would leak
  # between the parts; the help texts alone would be most of a validation part.
  " encodings pydoc_data".split()
)
# Written when Python was built or installed: they describe one machine.
_LEFT_OUT_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


def load_corpus(
  source: str,
  *,
  glob: str = "",
  seed: int = 0,
  validation_fraction: float = VALIDATION_FRACTION,
) -> Corpus:
  """Loads a corpus by the name of its source.

  Args:
    source: One of `SOURCES`.
    glob: Pattern of the files, for `text_files` only.
    seed: Which chain, for `synthetic` only.
    validation_fraction: Share held out, above 0 and below 1.

  Returns:
    The corpus, in memory.

  Raises:
    ValueError: The source is unknown, or has too little text.
  """
  if source == "stdlib":
    return stdlib(validation_fraction=validation_fraction)
  if source == "text_files":
    return text_files(glob, validation_fraction=validation_fraction)
  if source == "synthetic":
    return synthetic(seed, validation_fraction=validation_fraction)
  raise ValueError(
    f"unknown data source {source!r}: use one of {', '.join(SOURCES)}"
  )


def stdlib(*, validation_fraction: float = VALIDATION_FRACTION) -> Corpus:
  """Reads Python's own library, found beside the running interpreter.

  About 8 MB of real text that is always there. It differs between versions
  of Python, and so does its digest. Files that cannot be read are skipped.

  Args:
    validation_fraction: Share of the files held out.

  Returns:
    The library's modules as bytes, without tests, generated tables and
    packages installed later.
  """
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  files = {}
  for path in _library_modules(root):
    try:
      files[path.relative_to(root).as_posix()] = path.read_bytes()
    except OSError:  # Not ours to repair, and the rest is enough.
      continue
  return from_files("stdlib", files, validation_fraction)


def text_files(
  pattern: str, *, validation_fraction: float = VALIDATION_FRACTION
) -> Corpus:
  """Reads every file that a pattern matches, as bytes.

  Paths count from the part of the pattern before its first wildcard, so a
  folder can move without changing the digest or the split.

  Args:
    pattern: Glob pattern; `**` stands for folders of any depth.
    validation_fraction: Share of the files held out.

  Returns:
    The files in the order of their paths.

  Raises:
    ValueError: No file matches, one cannot be read, or all of them fall in
      one part.
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
  for folder, subfolders, names in os.walk(root):
    subfolders[:] = (
      s
      for s in subfolders
      if s not in _LEFT_OUT and not s.startswith("config-")
    )
    for name in names:
      if name.endswith(".py") and not name.startswith(_LEFT_OUT_FILES):
        yield pathlib.Path(folder, name)


def _fixed_part(pattern: str) -> pathlib.Path:
  parts = pathlib.Path(pattern).parts
  return pathlib.Path(
    *itertools.takewhile(lambda part: not glob.has_magic(part), parts)
  )
