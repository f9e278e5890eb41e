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
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dilocox_jax import files
from dilocox_jax.checks import json_object, of_type, require
from dilocox_jax.data import tokenizers
from dilocox_jax.data.corpus import Corpus, check_fraction, is_held_out
from dilocox_jax.data.documents import DAMAGED, Document
from dilocox_jax.data.tokenizers import Tokenizer

FORMAT = 1
INDEX, _PROGRESS = "index.json", "progress.json"
TRAIN, VALIDATION = "train", "validation"
_BATCH = 1000  # Documents that are encoded and written together.
# Types of what is read of a JSON file; both splits have a number of each count.
_COUNTS = ("tokens", "text_bytes")
_INDEX_TYPES = {
  **{"tokens": dict, "parts": list, "documents": int, "vocab_size": int},
  **{"dtype": str, "digest": str, "tokenizer_file": str},
  "bytes_per_token": float,
}
_PROGRESS_TYPES = {
  **{"tokens": dict, "parts": list, "documents": int, "text_bytes": dict},
  **{"settings": dict, "digest": str, "read": str},
}


@dataclasses.dataclass
class Progress:
  """What was written so far.

  Attributes:
    settings: What the tokens depend on; another value cannot be continued.
    documents: Documents that were written.
    read: Hash of these documents and of their parts.
    tokens: Tokens by split.
    text_bytes: Bytes of text by split, one for each end of a text included.
    parts: Training tokens of each part.
    digest: Hash of all tokens, batch by batch.
  """

  settings: Mapping[str, Any]
  documents: int = 0
  read: str = ""
  tokens: dict[str, int] = dataclasses.field(
    default_factory=lambda: {TRAIN: 0, VALIDATION: 0}
  )
  text_bytes: dict[str, int] = dataclasses.field(
    default_factory=lambda: {TRAIN: 0, VALIDATION: 0}
  )
  parts: list[int] = dataclasses.field(default_factory=list)
  digest: str = ""


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
    "format": FORMAT,
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


def _begun(folder: pathlib.Path, settings: Mapping[str, Any]) -> Progress:
  """Returns the progress of a folder, whose files are cut to it."""
  require(
    not (folder / INDEX).exists(),
    f"{folder} holds finished tokens already: take another folder or remove it",
  )
  path = folder / _PROGRESS
  progress = Progress(settings)
  if path.exists():
    remedy = f"remove {folder} and begin anew"
    values = _read_json(path, _PROGRESS_TYPES, remedy)
    found = Progress(**{name: values[name] for name in _PROGRESS_TYPES})
    require(
      found.documents == 0 or found.settings == dict(settings),
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
    _write_json(path, dataclasses.asdict(progress))
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
  _write_json(folder / _PROGRESS, dataclasses.asdict(progress))


def _finish(
  folder: pathlib.Path, tokenizer: Tokenizer, progress: Progress
) -> None:
  for split, count in progress.tokens.items():
    change = "more documents, or another validation fraction"
    require(count > 0, f"{folder} has no {split} text: it needs {change}")
  name = ""
  if tokenizer.content:
    is_json = tokenizer.content.lstrip().startswith(b"{")
    name = "tokenizer.json" if is_json else "tokenizer.model"
    with files.replaced(folder / name) as file:
      file.write(tokenizer.content)
  held_out = progress.text_bytes[VALIDATION] / progress.tokens[VALIDATION]
  index = {
    **progress.settings,
    "documents": progress.documents,
    "tokens": progress.tokens,
    "parts": progress.parts,
    "bytes_per_token": held_out,
    "digest": progress.digest[:16],
    "tokenizer_file": name,
  }
  _write_json(folder / INDEX, index)
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
  dtype = np.dtype(index["dtype"]).newbyteorder("<")
  arrays, missing = {}, 0
  for split, count in index["tokens"].items():
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
  made = tokenizers.byte_tokenizer()
  if index["tokenizer_file"]:
    file = str(path / index["tokenizer_file"])
    made = tokenizers.from_file(file, index.get("end_of_text", ""))
  return Corpus(
    "shards",
    arrays[TRAIN],
    arrays[VALIDATION],
    index["digest"] + (f"-{missing}" if missing else ""),
    index["vocab_size"],
    index["documents"],
    index["bytes_per_token"],
    made,
    missing,
    # What is missing is missing at the end, so of the last parts.
    _parts(index["parts"], len(arrays[TRAIN])),
  )


def _parts(parts: Sequence[int], num_tokens: int) -> tuple[int, ...]:
  ends = np.minimum(np.cumsum([0, *parts]), num_tokens)
  return tuple(map(int, np.diff(ends)))


def is_finished(folder: str) -> bool:
  """Whether a folder holds tokens that `write` finished."""
  return os.path.exists(os.path.join(os.path.expanduser(folder), INDEX))


def _index(path: pathlib.Path) -> dict[str, Any]:
  begun = ", which was begun and not finished: run the same command again"
  require(
    os.path.isfile(path / INDEX),
    f"{path} holds no tokens that experiments.prepare_data finished"
    f"{begun if os.path.exists(path / _PROGRESS) else ''}",
  )
  remedy = "copy the folder again, or write the tokens anew"
  index = _read_json(path / INDEX, _INDEX_TYPES, remedy)
  require(
    index.get("format") == FORMAT,
    f"{path / INDEX} has format {index.get('format')}, not {FORMAT}: write the "
    "tokens anew",
  )
  dtype = np.min_scalar_type(index["vocab_size"] - 1).name
  require(
    index["dtype"] == dtype,
    f"{path / INDEX} is damaged ({index['dtype']} instead of {dtype} for "
    f"{index['vocab_size']} tokens): {remedy}",
  )
  return index


def _read_json(
  path: pathlib.Path, types: Mapping[str, type], remedy: str
) -> dict[str, Any]:
  """Reads an object that has values of these types, unless of another format.

  Raises:
    ValueError: If it has not. The message is one line.
  """
  try:
    values = json_object(path.read_bytes(), "it")
    if values.get("format", FORMAT) == FORMAT:
      for name, kind in types.items():
        of_type(name, values.get(name), kind)
      for name in types.keys() & _COUNTS:
        for split in (TRAIN, VALIDATION):
          of_type(f"{name}.{split}", values[name].get(split), int)
      for number in values["parts"]:
        of_type("a part", number, int)
  except (OSError, ValueError) as error:
    raise ValueError(f"{path} is damaged ({error}): {remedy}") from None
  return values


def _file(folder: pathlib.Path, split: str) -> pathlib.Path:
  return folder / f"{split}.bin"


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  with files.replaced(path) as file:
    file.write(json.dumps(value, indent=2, sort_keys=True).encode())
