"""Loads the text of each data source that a config can name.

The default source must be real text that every machine has without a download.
So it is the source code of Python's standard library. To add a source, write a
function that returns a `Corpus`, and call `register_source`.
"""

import dataclasses
import inspect
import logging
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dilocox_jax.checks import known
from dilocox_jax.data import shards
from dilocox_jax.data.corpus import VALIDATION_FRACTION, Corpus, from_files
from dilocox_jax.data.documents import (
  DAMAGED,
  TEXT_FIELD,
  Document,
  OnDamage,
  in_parts,
  matching_files,
  read_documents,
  sampled,
)
from dilocox_jax.data.huggingface import TRAIN_SPLIT, read_dataset
from dilocox_jax.data.markov import synthetic
from dilocox_jax.data.tokenizers import MakeTokenizer, byte_tokenizer
from dilocox_jax.plan.choices import Registry

SOURCES: Registry[Callable[..., Corpus]] = Registry("data source")
_DEFAULTS: dict[str, Any] = {
  "glob": "",
  "seed": 0,
  "validation_fraction": VALIDATION_FRACTION,
  "judge_fraction": 0.0,
  "tokenizer": byte_tokenizer,
  "text_field": TEXT_FIELD,
  "split": TRAIN_SPLIT,
  "shuffle_buffer": 0,
  "max_documents": 0,
  "damaged": DAMAGED[0],
}
SETTINGS = tuple(_DEFAULTS)

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
    **settings: Those of `SETTINGS` that are not at their default. They are
      `glob`, `seed`, `validation_fraction`, `judge_fraction`, `text_field`,
      `split`, `shuffle_buffer`, `max_documents` and `damaged`, as in the
      section `data` of a config, and `tokenizer`, a function from training
      documents to a tokenizer (`tokenizers.choose`). A source gets those that
      it reads.

  Raises:
    ValueError: If the source is unknown or has too little text.
  """
  known("data source", source, SOURCES)
  given = _DEFAULTS | settings
  load = SOURCES[source]
  return load(**{name: given[name] for name in SETTINGS if reads(source, name)})


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
  damaged: str = DAMAGED[0],
  judge_fraction: float = 0.0,
) -> Corpus:
  """Reads every file that a pattern matches (`documents.read_documents`).

  Args:
    glob: Glob pattern; `**` matches folders of any depth. Several, joined by
      ";", are the parts of the text.
    validation_fraction: Share of the documents that is held out for validation,
      above 0 and below 1.
    tokenizer: As for `load_corpus`.
    text_field: Field of a JSON line that has the text.
    damaged: "error", or "skip" to leave out and count what cannot be read.
    judge_fraction: Share of the held-out documents that judge (`from_files`).

  Raises:
    ValueError: If no file matches, if a file cannot be read, or if training or
      validation has no text.
  """

  def read(on_damage: OnDamage | None) -> Iterator[Document]:
    def of_glob(one: str) -> Iterator[Document]:
      for name, path in matching_files(one):
        yield from read_documents(name, path, text_field, on_damage)

    return in_parts(glob, of_glob)

  shares = validation_fraction, judge_fraction
  return _corpus("text_files", read, damaged, shares, tokenizer)


def huggingface(
  *,
  glob: str,
  seed: int = 0,
  validation_fraction: float = VALIDATION_FRACTION,
  tokenizer: MakeTokenizer = byte_tokenizer,
  text_field: str = TEXT_FIELD,
  split: str = TRAIN_SPLIT,
  shuffle_buffer: int = 0,
  max_documents: int = 0,
  damaged: str = DAMAGED[0],
  judge_fraction: float = 0.0,
) -> Corpus:
  """Reads a data set into memory (`huggingface.read_dataset`).

  Args:
    glob: A saved data set, a pattern of files, or a name on the hub. Several,
      joined by ";", are the parts of the text.
    seed: Seed of the documents that `max_documents` takes.
    validation_fraction: As for `text_files`.
    tokenizer: As for `load_corpus`.
    text_field: Field that has the text.
    split: Split that is read; the validation text is held out from it.
    shuffle_buffer: As in `documents.sampled`.
    max_documents: Documents of a part to read at most; 0 reads all.
    damaged: As for `text_files`.
    judge_fraction: As for `text_files`.

  Raises:
    ValueError: If it cannot be read, or has too little text.
  """

  def read(on_damage: OnDamage | None) -> Iterator[Document]:
    def of_glob(glob: str) -> Iterator[Document]:
      found = read_dataset(glob, text_field, split, on_damage)
      return sampled(found, shuffle_buffer, max_documents, seed)

    return in_parts(glob, of_glob)

  shares = validation_fraction, judge_fraction
  return _corpus("huggingface", read, damaged, shares, tokenizer)


def _corpus(
  name: str,
  read: Callable[[OnDamage | None], Iterable[Document]],
  damaged: str,
  shares: tuple[float, float],
  tokenizer: MakeTokenizer,
) -> Corpus:
  """Makes a corpus of documents, and counts those that cannot be read."""
  skipped: list[ValueError] = []
  on_damage = skipped.append if damaged == "skip" else None
  found, part_of = {}, {}
  for document in read(on_damage):
    found[document.name] = document.content
    part_of[document.name] = document.part
  for error in skipped:
    logging.getLogger(__name__).warning("skipped: %s", error)
  held_out, judging = shares
  made = from_files(name, found, held_out, tokenizer, part_of, judging)
  return dataclasses.replace(made, num_skipped=len(skipped))


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


register_source("stdlib", stdlib)
register_source("text_files", text_files)
register_source(
  "shards", lambda *, glob, damaged: shards.map_corpus(glob, damaged)
)
register_source("synthetic", synthetic)
register_source("huggingface", huggingface)
