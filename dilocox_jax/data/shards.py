"""Tokens in files that are mapped into memory, for text larger than memory.

A folder has the tokens of each split as one plain file of unsigned integers,
and an index that says what they are, beside a copy of the tokenizer's file:

    train.bin  validation.bin  index.json

Every document ends with the tokenizer's end of a text. A document is held out
for validation by the hash of its content, so copies of it never lie in both
splits.

Writing goes on where it was interrupted. `progress.json` says how many
documents were written, their hash, and how long the files were then; whatever
follows in them is cut off.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np

from dilocox_jax import files
from dilocox_jax.checks import dataclass_from, json_object, of_type, require
from dilocox_jax.data import tokenizers
from dilocox_jax.data.corpus import Corpus, check_fraction, is_held_out
from dilocox_jax.data.documents import DAMAGED, Document
from dilocox_jax.data.tokenizers import Tokenizer

FORMAT = 2
INDEX, _PROGRESS = "index.json", "progress.json"
TRAIN, VALIDATION = "train", "validation"
_BATCH = 1000  # Documents that are encoded and written together.


def _none_of_both() -> dict[str, int]:
  return {TRAIN: 0, VALIDATION: 0}


@dataclasses.dataclass
class Progress:
  """What was written so far; the index of a folder is that of all documents.

  Attributes:
    settings: What the tokens depend on; another value cannot be continued.
    documents: Documents that were written.
    read: Hash of these documents and of their parts.
    tokens: Tokens by split.
    text_bytes: Bytes of text by split, one for each end of a text included.
    parts: Training tokens of each part.
    digest: Hash of all tokens, batch by batch.
    tokenizer_file: Name of the copy of the tokenizer's file; "" for bytes.
    format: Number of this form of files.
  """

  settings: dict
  documents: int = 0
  read: str = ""
  tokens: dict = dataclasses.field(default_factory=_none_of_both)
  text_bytes: dict = dataclasses.field(default_factory=_none_of_both)
  parts: list = dataclasses.field(default_factory=list)
  digest: str = ""
  tokenizer_file: str = ""
  format: int = FORMAT


def write(
  folder: pathlib.Path,
  documents: Iterable[Document],
  tokenizer: Tokenizer,
  validation_fraction: float,
  source: Mapping[str, Any] | None = None,
) -> Generator[Progress, None, None]:
  """Writes documents as tokens, and yields the progress after each batch.

  Args:
    folder: Where to write; made if missing. What an interrupted call with the
      same arguments wrote there is kept.
    documents: All documents, those that were written before included, in the
      order of their parts.
    tokenizer: Makes the tokens.
    validation_fraction: Share of the documents that is held out, above 0 and
      below 1.
    source: Where the documents come from, values that JSON can hold. An
      interrupted call goes on only if they are the same, and if the documents
      that it has written are.

  Raises:
    ValueError: If the folder holds other tokens or files, or a split has no
      document. The message is one line.
  """
  check_fraction(validation_fraction)
  settings = {
    "dtype": tokenizer.dtype.name,
    "vocab_size": tokenizer.vocab_size,
    "tokenizer": tokenizer.name,
    "tokenizer_digest": tokenizer.digest,
    "end_of_text": tokenizer.end_name,
    "validation_fraction": validation_fraction,
    "source": dict(source or {}),
  }
  folder.mkdir(parents=True, exist_ok=True)
  progress = _begun(folder, settings)
  read, documents = hashlib.sha256(), iter(documents)
  for document in itertools.islice(documents, progress.documents):
    read.update(_hashed(document))
  require(
    progress.documents == 0 or read.hexdigest() == progress.read,
    f"the documents that {folder} was begun with have changed: remove it and "
    "begin anew, or take another folder",
  )
  while batch := list(itertools.islice(documents, _BATCH)):
    for document in batch:
      read.update(_hashed(document))
    progress.read = read.hexdigest()
    _append(folder, batch, tokenizer, progress)
    yield progress
  _finish(folder, tokenizer, progress)


def is_validation(document: Document, validation_fraction: float) -> bool:
  """Whether a document is held out, by the hash of its content.

  Args:
    document: The document.
    validation_fraction: Share of documents that is held out, 0 to 1.
  """
  content = hashlib.sha256(document.content).hexdigest()
  return is_held_out(content, validation_fraction)


def _hashed(document: Document) -> bytes:
  """Returns what counts of a document in the hash of those that were read."""
  return b"%d %d " % (document.part, len(document.content)) + document.content


def _begun(folder: pathlib.Path, settings: dict[str, Any]) -> Progress:
  """Returns the progress of a folder, whose files are cut to it."""
  require(
    not (folder / INDEX).exists(),
    f"{folder} holds finished tokens already: take another folder or remove it",
  )
  path = folder / _PROGRESS
  progress = Progress(settings)
  if path.exists():
    found = _read(path, f"remove {folder} and begin anew")
    require(
      found.documents == 0 or found.settings == settings,
      f"{folder} was begun with other settings or documents: give those again, "
      "or take another folder",
    )
    progress = found if found.documents else progress
  else:
    # Files that are there before the progress is are not of such a call.
    for split in progress.tokens:
      file = _file(folder, split)
      require(
        not file.exists(),
        f"{file} is there, and nothing says who wrote it: take another folder",
      )
    _write(path, progress)
  width = np.dtype(settings["dtype"]).itemsize
  for split, count in progress.tokens.items():
    with files.opened_to_append(_file(folder, split)) as file:
      require(
        file.tell() >= count * width,
        f"{_file(folder, split)} is shorter than {path} says: remove {folder} "
        "and begin anew",
      )
      file.truncate(count * width)
  return progress


def _append(
  folder: pathlib.Path,
  batch: list[Document],
  tokenizer: Tokenizer,
  progress: Progress,
) -> None:
  """Writes a batch to the end of the files, then the progress."""
  fraction = progress.settings["validation_fraction"]
  parts: dict[str, list[np.ndarray]] = {TRAIN: [], VALIDATION: []}
  encoded = tokenizer.encode([document.content for document in batch])
  end = np.asarray([tokenizer.end_of_text], tokenizer.dtype)
  for document, tokens in zip(batch, encoded, strict=True):
    split = VALIDATION if is_validation(document, fraction) else TRAIN
    if split == TRAIN:
      absent = document.part + 1 - len(progress.parts)
      progress.parts += [0] * absent
      progress.parts[document.part] += len(tokens) + 1
    parts[split] += [tokens.astype(tokenizer.dtype, copy=False), end]
    progress.text_bytes[split] += len(document.content) + 1
  for split, arrays in parts.items():
    if arrays:
      written = np.concatenate(arrays)
      content = written.astype(written.dtype.newbyteorder("<")).tobytes()
      with files.opened_to_append(_file(folder, split)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
      progress.tokens[split] += written.size
      progress.digest = hashlib.sha256(
        f"{progress.digest} {split} ".encode() + content
      ).hexdigest()
  progress.documents += len(batch)
  _write(folder / _PROGRESS, progress)


def _finish(
  folder: pathlib.Path, tokenizer: Tokenizer, progress: Progress
) -> None:
  for split, count in progress.tokens.items():
    change = "more documents, or another validation fraction"
    require(count > 0, f"{folder} has no {split} text: it needs {change}")
  if tokenizer.content:
    is_json = tokenizer.content.lstrip().startswith(b"{")
    progress.tokenizer_file = f"tokenizer.{'json' if is_json else 'model'}"
    with files.replaced(folder / progress.tokenizer_file) as file:
      file.write(tokenizer.content)
  _write(folder / INDEX, progress)
  (folder / _PROGRESS).unlink(missing_ok=True)


def map_corpus(folder: str, damaged: str = DAMAGED[0]) -> Corpus:
  """Maps the tokens of a folder; nothing but the index is read.

  Args:
    folder: What `write` finished.
    damaged: What to do with a file that is too short: "error", or "skip" to
      take the tokens that are there and to count those that are missing.

  Raises:
    ValueError: If it is no such folder, or a file is too short or too long.
      The message is one line.
  """
  path = pathlib.Path(os.path.expanduser(folder))
  index = _index(path)
  settings = index.settings
  dtype = np.dtype(settings["dtype"]).newbyteorder("<")
  arrays, missing = {}, 0
  for split, count in index.tokens.items():
    file = _file(path, split)
    size = file.stat().st_size if file.exists() else 0
    found, whole = min(size // dtype.itemsize, count), count * dtype.itemsize
    may_skip = 0 < found and size < whole  # Of a longer file no token is sure.
    or_skip = ", or set data.damaged=skip" if may_skip else ""
    require(
      size == whole > 0 or (damaged == "skip" and may_skip),
      f"{file} has {size:,} bytes instead of {whole:,}: copy the folder again, "
      f"write it anew{or_skip}",
    )
    arrays[split] = np.memmap(file, dtype, "r", shape=(found,))
    missing += count - found
  train, made = arrays[TRAIN], tokenizers.byte_tokenizer()
  if index.tokenizer_file:
    file = str(path / index.tokenizer_file)
    made = tokenizers.from_file(file, settings.get("end_of_text", ""))
  return Corpus(
    "shards",
    train,
    arrays[VALIDATION],
    index.digest[:16] + (f"-{missing}" if missing else ""),
    settings["vocab_size"],
    index.documents,
    index.text_bytes[VALIDATION] / index.tokens[VALIDATION],
    made,
    missing,
    # What is missing is missing at the end, so of the last parts.
    tuple(
      map(int, np.diff(np.minimum(np.cumsum([0, *index.parts]), len(train))))
    ),
  )


def is_finished(folder: str) -> bool:
  """Whether a folder holds tokens that `write` finished."""
  return os.path.exists(os.path.join(os.path.expanduser(folder), INDEX))


def _index(path: pathlib.Path) -> Progress:
  begun = ", which was begun and not finished: run the same command again"
  require(
    os.path.isfile(path / INDEX),
    f"{path} holds no tokens that experiments.prepare_data finished"
    f"{begun if os.path.exists(path / _PROGRESS) else ''}",
  )
  return _read(path / INDEX, "copy the folder again, or write the tokens anew")


def _read(path: pathlib.Path, remedy: str) -> Progress:
  """Reads what `_write` wrote.

  Raises:
    ValueError: If it is damaged or of another format. The message is one line.
  """
  try:
    values = json_object(path.read_bytes(), "it")
    number = values.get("format")
    require(number == FORMAT, f"it has format {number!r}, not {FORMAT}")
    found = dataclass_from(Progress, values)
    for count in (
      *(found.tokens[split] for split in (TRAIN, VALIDATION)),
      *(found.text_bytes[split] for split in (TRAIN, VALIDATION)),
      *found.parts,
    ):
      of_type("a count", count, int)
    size, dtype = found.settings["vocab_size"], found.settings["dtype"]
    needed = np.min_scalar_type(size - 1).name
    require(dtype == needed, f"{dtype} instead of {needed} for {size} tokens")
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is damaged ({error}): {remedy}") from None
  return found


def _file(folder: pathlib.Path, split: str) -> pathlib.Path:
  return folder / f"{split}.bin"


def _write(path: pathlib.Path, progress: Progress) -> None:
  with files.replaced(path) as file:
    values = dataclasses.asdict(progress)
    file.write(json.dumps(values, indent=2, sort_keys=True).encode())
