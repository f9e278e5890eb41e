"""Loads the text of each data source that a config can name.

The default source must be real text that every machine has without a download.
So it is the source code of Python's standard library. To add a source, write a
function that returns a `Corpus`, and call `register_source`.
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
SETTINGS = (
  "glob seed validation_fraction judge_fraction tokenizer text_field".split()
)

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
# Python's build or installation writes these files for one machine.
_LEFT_OUT_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


def register_source(name: str, load: Callable[..., Corpus]) -> None:
  """Makes a data source known under a name, for `data.source`.

  Args:
    name: The name, e.g. "text_files".
    load: Function that returns a `Corpus`. It is called with those of
      `SETTINGS` that are arguments of it; others must have defaults.

  Raises:
    ValueError: If the name is taken or the function needs other arguments.
  """
  for argument in inspect.signature(load).parameters.values():
    if argument.default is inspect.Parameter.empty:
      known(f"argument of data source {name!r}", argument.name, SETTINGS)
  SOURCES.add(name, load)


def reads(source: str, setting: str) -> bool:
  """Returns whether a source is known and reads one of `SETTINGS`.

  Args:
    source: Name of a source, known or not.
    setting: Name of a setting, one of `SETTINGS`.
  """
  load = SOURCES.get(source)
  return load is not None and setting in inspect.signature(load).parameters


def load_corpus(source: str, **settings: Any) -> Corpus:
  """Loads a corpus by the name of its source.

  Args:
    source: One of `SOURCES`.
    **settings: Some of `SETTINGS`, as in the section `data` of a config, and
      `tokenizer`, a function from training documents to a tokenizer
      (`tokenizers.choose`). A source gets those that it reads.

  Raises:
    ValueError: If the source is unknown or has too little text.
  """
  known("data source", source, SOURCES)
  given = {k: v for k, v in settings.items() if reads(source, k)}
  return SOURCES[source](**given)


def stdlib(
  *,
  validation_fraction: float = VALIDATION_FRACTION,
  tokenizer: MakeTokenizer = byte_tokenizer,
  judge_fraction: float = 0.0,
) -> Corpus:
  """Reads the standard library of the Python that runs this program.

  This is about 8 MB of real text. It differs between versions of Python, and
  so does its digest. Files that cannot be read are skipped.

  Args:
    validation_fraction: Share of the files that is held out for validation,
      above 0 and below 1.
    tokenizer: As for `load_corpus`.
    judge_fraction: Share of the held-out files that judge (`from_files`).

  Returns:
    The tokens of the library's modules. Tests, generated files and packages
    that were installed later are left out.
  """
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  files = {}
  for path in _library_modules(root):
    try:
      files[path.relative_to(root).as_posix()] = path.read_bytes()
    except OSError:  # The other files are enough.
      continue
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
  """Reads every file that a pattern matches (`documents.read_globs`).

  A single text is cut at ends of lines into a hundred, of which some validate.

  Args:
    glob: Glob pattern; `**` matches folders of any depth. Several, joined by
      ";", are the parts of the text.
    validation_fraction: Share of the documents that is held out for validation,
      above 0 and below 1.
    tokenizer: As for `load_corpus`.
    text_field: Field of a JSON line that has the text.
    judge_fraction: Share of the held-out documents that judge (`from_files`).

  Raises:
    ValueError: If no file matches, if a file cannot be read, or if training or
      validation has no text.
  """
  files = {}
  part_of = {}
  for _, documents in read_globs(glob, text_field):
    for name, content, part in documents:
      files[name] = content
      part_of[name] = part
  if len(files) == 1:
    files = _in_pieces(*files.popitem())
  return from_files(
    "text_files", files, validation_fraction, tokenizer, part_of, judge_fraction
  )


def _in_pieces(name: str, text: bytes) -> dict[str, bytes]:
  """Cuts a text at ends of lines into at most a hundred, by name."""
  lines = text.splitlines(keepends=True)
  size = math.ceil(len(lines) / 100)
  starts = range(0, len(lines), max(size, 1))
  return {f"{name}:{n + 1}": b"".join(lines[n : n + size]) for n in starts}


def _library_modules(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the paths of the library's modules that are not left out."""
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


# Index of the successor that each of eight equally likely draws chooses. So
# the four successors have the probabilities 1/2, 1/4, 1/8 and 1/8.
_BRANCHES = (0, 0, 0, 0, 1, 1, 2, 3)


def synthetic(
  seed: int = 0,
  *,
  num_tokens: int = 2**20,
  vocab_size: int = 64,
  validation_fraction: float = VALIDATION_FRACTION,
) -> Corpus:
  """Draws text of known entropy from a first-order Markov chain.

  Python's library changes with Python's version, and nobody knows its entropy.
  This text is the same on every machine, and the loss of any model on it has a
  known floor: 7/4 bits, or 1.213 nats, per token.

  A token t is followed by one of the four tokens p[t], p[t+1], p[t+2], p[t+3]
  with the probabilities 1/2, 1/4, 1/8, 1/8. Here p is a shuffle of the
  vocabulary, and indices wrap around. Every token is followed, and preceded,
  with the same four probabilities, so all tokens are equally frequent. Bits
  come from a standard hash of the seed, so no version of Python or numpy
  changes a token.

  Args:
    seed: Integer seed of the shuffle and of both streams.
    num_tokens: Number of training tokens.
    vocab_size: Number of different tokens, 4 or more.
    validation_fraction: Validation tokens for each training token.

  Returns:
    A corpus of two independent streams of the same chain.
  """
  keys = np.frombuffer(_noise(f"{seed}/chain", 8 * vocab_size), "<u8")
  table = np.argsort(keys, kind="stable").tolist()
  num_held_out = math.ceil(num_tokens * validation_fraction)
  train = _draw(table, f"{seed}/train", num_tokens)
  held_out = _draw(table, f"{seed}/validation", num_held_out)
  little_endian = train.dtype.newbyteorder("<")
  streams = {"train": train, "validation": held_out}
  content = {k: x.astype(little_endian).tobytes() for k, x in streams.items()}
  digest = digest_of(content)
  return Corpus("synthetic", train, held_out, digest, vocab_size, num_files=0)


def _noise(key: str, num_bytes: int) -> bytes:
  return hashlib.shake_256(f"synthetic/{key}".encode()).digest(num_bytes)


def _draw(table: list[int], key: str, num_tokens: int) -> np.ndarray:
  size = len(table)
  token = int.from_bytes(_noise(f"{key}/start", 8), "big") % size
  tokens = []
  for byte in _noise(key, num_tokens):
    token = table[(token + _BRANCHES[byte % len(_BRANCHES)]) % size]
    tokens.append(token)
  return np.asarray(tokens, np.uint8 if size <= 256 else np.int32)


register_source("stdlib", stdlib)
register_source("text_files", text_files)
register_source("shards", lambda *, glob: shards.map_corpus(glob))
register_source("synthetic", synthetic)
