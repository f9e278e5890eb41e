"""Loads the text of each data source that a config can name (`data.source`).

The default source is the source code of Python's standard library, so a run
needs no download. To add a source, write a function that returns a `Corpus`,
and call `register_source`.
"""

import hashlib
import inspect
import math
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dilocox_jax.checks import known
from dilocox_jax.data import shards
from dilocox_jax.data.corpus import (
  VALIDATION_FRACTION,
  Corpus,
  digest_of,
  from_files,
)
from dilocox_jax.data.documents import TEXT_FIELD, read_globs
from dilocox_jax.data.tokenizers import MakeTokenizer, byte_tokenizer
from dilocox_jax.plan.choices import Registry

SOURCES: Registry[Callable[..., Corpus]] = Registry("data source")
# Names of the arguments that a source may take.
SETTINGS = (
  "glob seed validation_fraction judge_fraction tokenizer text_field".split()
)

# Folders of Python's standard library that the source "stdlib" leaves out.
_LEFT_OUT = frozenset(
  # Distributions of Python leave out, move or add these folders. Two builds of
  # one version of Python seldom differ in other folders.
  "site-packages dist-packages __pycache__ test tests idle_test idlelib"
  " lib2to3 distutils ensurepip tkinter turtledemo"
  # The files in these folders are generated. The code pages in `encodings` are
  # nearly equal, so training text would nearly repeat validation text. The help
  # texts in `pydoc_data` would be most of the validation text.
  " encodings pydoc_data".split()
)
# Starts of the names of files that "stdlib" leaves out. Python's build or
# installation writes these files for one machine.
_LEFT_OUT_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


def register_source(name: str, load: Callable[..., Corpus]) -> None:
  """Registers a data source under a name that configs may use (`data.source`).

  Args:
    name: The name, e.g. "text_files".
    load: Function that returns a `Corpus`. Arguments that have a name of
      `SETTINGS`, e.g. `seed`, get the value of the setting, by keyword. Any
      other argument must have a default.

  Raises:
    ValueError: If the name is taken, or if an argument is no setting and has no
      default.
  """
  for argument in inspect.signature(load).parameters.values():
    if argument.default is inspect.Parameter.empty:
      known(f"argument of data source {name!r}", argument.name, SETTINGS)
  SOURCES.add(name, load)


def reads(source: str, setting: str) -> bool:
  """Returns whether a data source has a setting as an argument.

  For a source that is not registered, the result is False.
  """
  load = SOURCES.get(source)
  return load is not None and setting in inspect.signature(load).parameters


def load_corpus(source: str, **settings: Any) -> Corpus:
  """Loads a corpus by the name of its source.

  Args:
    source: Name of a registered source, e.g. "stdlib".
    **settings: Values of the settings in `SETTINGS`, by name. Settings that the
      source does not have are ignored.

  Raises:
    ValueError: If the source is unknown, if it has too little text, if the text
      cannot be read, or if the tokenizer cannot be made.
  """
  known("data source", source, SOURCES)
  read_settings = {
    name: value for name, value in settings.items() if reads(source, name)
  }
  return SOURCES[source](**read_settings)


def stdlib(
  *,
  validation_fraction: float = VALIDATION_FRACTION,
  tokenizer: MakeTokenizer = byte_tokenizer,
  judge_fraction: float = 0.0,
) -> Corpus:
  """Reads the standard library of the Python that runs this program.

  This is about 8 MB of text, which differs between versions of Python. Tests,
  generated files, installed packages and some other files are left out.

  Args:
    validation_fraction: Share of the files that is held out for validation,
      above 0 and below 1.
    tokenizer: Function from the training documents to a tokenizer.
    judge_fraction: Share of the held-out files that become the judge text,
      which only the last evaluation of a run reads, from 0 to below 1.

  Raises:
    ValueError: If a text would be empty, or if the tokenizer cannot be made.
  """
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  files = {}
  for path in _stdlib_modules(root):
    try:
      files[path.relative_to(root).as_posix()] = path.read_bytes()
    except OSError:
      continue  # The file cannot be read. The others are enough.
  return from_files(
    "stdlib",
    files,
    validation_fraction,
    tokenizer,
    judge_fraction=judge_fraction,
  )


def text_files(
  glob: str,
  *,
  validation_fraction: float = VALIDATION_FRACTION,
  tokenizer: MakeTokenizer = byte_tokenizer,
  text_field: str = TEXT_FIELD,
  judge_fraction: float = 0.0,
) -> Corpus:
  """Reads every file that a pattern matches.

  If there is only one document, it is cut at ends of lines into at most a
  hundred documents, so that some of them can be held out.

  Args:
    glob: Glob pattern; `**` matches folders of any depth. Several patterns are
      joined by ";". The files of each pattern are a part of the text.
    validation_fraction: Share of the documents that is held out for validation,
      above 0 and below 1.
    tokenizer: Function from the training documents to a tokenizer.
    text_field: Name of the field with the text, in a file of JSON lines.
    judge_fraction: Share of the held-out documents that become the judge text,
      which only the last evaluation of a run reads, from 0 to below 1.

  Raises:
    ValueError: If no file matches, if a file cannot be read or has no valid
      text, if a text would be empty, or if the tokenizer cannot be made.
  """
  files = {}
  part_of = {}
  for _, documents in read_globs(glob, text_field):
    for name, content, part in documents:
      files[name] = content
      part_of[name] = part
  if len(files) == 1:
    ((name, content),) = files.items()
    files = _in_pieces(name, content)
  return from_files(
    "text_files",
    files,
    validation_fraction,
    tokenizer,
    part_of=part_of,
    judge_fraction=judge_fraction,
  )


def _in_pieces(name: str, text: bytes) -> dict[str, bytes]:
  """Cuts a document at ends of lines into at most a hundred pieces.

  The result has the pieces by their names: "a.txt:31" begins at line 31 of
  "a.txt".
  """
  lines = text.splitlines(keepends=True)
  num_lines = max(1, math.ceil(len(lines) / 100))  # Lines of a piece.
  pieces = {}
  for start in range(0, len(lines), num_lines):
    piece = b"".join(lines[start : start + num_lines])
    pieces[f"{name}:{start + 1}"] = piece
  return pieces


def _stdlib_modules(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the paths of the modules of Python's standard library.

  Folders in `_LEFT_OUT`, folders "config-...", and files in `_LEFT_OUT_FILES`
  are left out.
  """
  for folder, subfolders, names in os.walk(root):
    # os.walk reads this list again, so it skips the folders that are removed.
    subfolders[:] = (
      subfolder
      for subfolder in subfolders
      if subfolder not in _LEFT_OUT and not subfolder.startswith("config-")
    )
    for name in names:
      if name.endswith(".py") and not name.startswith(_LEFT_OUT_FILES):
        yield pathlib.Path(folder, name)


# A token of the synthetic text has four possible successors, 0 to 3. A random
# byte modulo 8 is an index of this tuple, whose entry is the successor. So the
# successors have the probabilities 1/2, 1/4, 1/8 and 1/8.
_BRANCHES = (0, 0, 0, 0, 1, 1, 2, 3)


def synthetic(
  seed: int = 0,
  *,
  num_tokens: int = 2**20,
  vocab_size: int = 64,
  validation_fraction: float = VALIDATION_FRACTION,
) -> Corpus:
  """Draws text from a Markov chain with an entropy of 7/4 bits per token.

  This is 1.213 nats. No model can have a lower expected loss per token.

  A token t is followed by one of the four tokens p[t], p[t+1], p[t+2], p[t+3]
  with the probabilities 1/2, 1/4, 1/8, 1/8. Here p is a shuffle of the
  vocabulary, and indices wrap around. The random bits are a hash of the seed,
  so the text is the same on every machine.

  Args:
    seed: Integer seed of the shuffle and of both texts.
    num_tokens: Number of training tokens.
    vocab_size: Number of different tokens, 4 or more.
    validation_fraction: Number of validation tokens divided by the number of
      training tokens.
  """
  # A random number of 8 bytes for each token. Their order is the shuffle.
  sort_keys = np.frombuffer(
    _random_bytes(f"{seed}/chain", 8 * vocab_size), "<u8"
  )
  shuffled_tokens = np.argsort(sort_keys, kind="stable").tolist()
  num_held_out = math.ceil(num_tokens * validation_fraction)
  train = _draw(shuffled_tokens, f"{seed}/train", num_tokens)
  held_out = _draw(shuffled_tokens, f"{seed}/validation", num_held_out)
  little_endian = train.dtype.newbyteorder("<")
  content = {
    "train": train.astype(little_endian).tobytes(),
    "validation": held_out.astype(little_endian).tobytes(),
  }
  return Corpus(
    name="synthetic",
    train=train,
    validation=held_out,
    digest=digest_of(content),
    vocab_size=vocab_size,
    num_files=0,
  )


def _random_bytes(key: str, num_bytes: int) -> bytes:
  """Returns pseudo-random bytes that depend only on the key."""
  return hashlib.shake_256(f"synthetic/{key}".encode()).digest(num_bytes)


def _draw(shuffled_tokens: list[int], key: str, num_tokens: int) -> np.ndarray:
  """Draws tokens from the Markov chain of `synthetic`.

  The shuffle p is `shuffled_tokens`. The key decides the random bytes.
  """
  vocab_size = len(shuffled_tokens)
  start = int.from_bytes(_random_bytes(f"{key}/start", 8), "big")
  token = start % vocab_size
  tokens = []
  for byte in _random_bytes(key, num_tokens):
    successor = _BRANCHES[byte % len(_BRANCHES)]
    token = shuffled_tokens[(token + successor) % vocab_size]
    tokens.append(token)
  return np.asarray(tokens, np.uint8 if vocab_size <= 256 else np.int32)


register_source("stdlib", stdlib)
register_source("text_files", text_files)
register_source("shards", lambda *, glob: shards.map_corpus(glob))
register_source("synthetic", synthetic)
