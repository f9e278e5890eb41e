"""Reads documents through Hugging Face's library `datasets`.

It needs the extra `hf` (`pip install 'dilocox_jax[hf]'`), which is imported
when it is used. A data set that was saved to disk is mapped. Parquet and Arrow
files and a data set of the hub, such as C4, are streamed.

A document is named by the hash of its content. So neither the order of reading
nor the kind of file decides whether it is held out, and copies count once.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from dilocox_jax.checks import extra_package, one_of
from dilocox_jax.data.documents import (
  TEXT_FIELD,
  Document,
  OnDamage,
  document_text,
  matching_files,
  read_documents,
  tell,
)

TRAIN_SPLIT = "train"
_STREAMED = {".parquet": "parquet", ".arrow": "arrow"}
_SAVED = ("dataset_info.json", "dataset_dict.json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def read_dataset(
  place: str,
  text_field: str = TEXT_FIELD,
  split: str = TRAIN_SPLIT,
  on_damage: OnDamage | None = None,
) -> Iterator[Document]:
  """Yields the documents of a data set, in its own order.

  Args:
    place: Folder that `save_to_disk` wrote, pattern of .parquet, .arrow and
      .jsonl files, or a name on the hub, "allenai/c4:en" with its subset.
    text_field: Field that has the text.
    split: Split of a saved data set or of one on the hub.
    on_damage: Called with the error of a row or a file that cannot be read,
      which is then left out. None raises the error.

  Raises:
    ValueError: If the package is missing, or the data set cannot be read,
      e.g. without a network. The message is one line.
  """
  # While it is imported it says which versions it found.
  logging.getLogger("datasets").setLevel(logging.WARNING)
  library = extra_package("datasets", "data.source=huggingface", "hf")
  folder = pathlib.Path(os.path.expanduser(place))
  named = functools.partial(_named, text_field=text_field, on_damage=on_damage)
  if any((folder / name).exists() for name in _SAVED):
    yield from named(_saved(library, folder, split), place)
    return
  if _HUB_NAME.fullmatch(place) and not folder.exists():
    yield from named(_hub(library, place, split), place)
    return
  for name, path in matching_files(place):
    try:
      if path.suffix.lower() in _STREAMED:
        yield from named(_file(library, path), str(path))
        continue
      for document in read_documents(name, path, text_field, on_damage):
        yield _by_content(document.content)
    except ValueError as error:
      tell(error, on_damage)


def _saved(library: Any, folder: pathlib.Path, split: str) -> Iterator:
  with _one_line(str(folder)):
    found = library.load_from_disk(str(folder))
    if isinstance(found, library.DatasetDict):
      one_of("data.split", split, found)
      found = found[split]
    yield from found


def _file(library: Any, path: pathlib.Path) -> Iterator:
  with _one_line(str(path)):
    yield from library.load_dataset(
      _STREAMED[path.suffix.lower()],
      data_files={TRAIN_SPLIT: [str(path)]},
      split=TRAIN_SPLIT,
      streaming=True,
    )


def _hub(library: Any, place: str, split: str) -> Iterator:
  name, _, subset = place.partition(":")
  with _one_line(place):
    with _quiet_retries():
      found = library.load_dataset(
        name, subset or None, split=split, streaming=True
      )
    yield from found


@contextlib.contextmanager
def _quiet_retries() -> Iterator[None]:
  """Keeps the hub's client from a warning for each of its attempts.

  It tries for half a minute. What it raises in the end says the same once.
  """
  logger = logging.getLogger("huggingface_hub")
  level = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(level)


@contextlib.contextmanager
def _one_line(place: str) -> Iterator[None]:
  """Turns what the library raises, which may be anything, into one line."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{place}: {' '.join(str(error).split())}") from error
  except ConnectionError as error:
    raise ValueError(
      f"{place} is no folder and no file here, and the hub cannot be reached "
      f"({error}): save the data set with save_to_disk where there is a "
      "network, and give its folder"
    ) from error
  except Exception as error:
    reason = " ".join(str(error).split()) or type(error).__name__
    raise ValueError(f"cannot read the data set {place}: {reason}") from error


def _named(
  rows: Iterable,
  place: str,
  text_field: str,
  on_damage: OnDamage | None,
) -> Iterator[Document]:
  for number, row in enumerate(rows):
    try:
      yield _by_content(
        document_text(row, text_field, f"{place}, row {number}")
      )
    except ValueError as error:
      tell(error, on_damage)


def _by_content(content: bytes) -> Document:
  return Document(hashlib.sha256(content).hexdigest(), content)
