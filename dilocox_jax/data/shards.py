"""Writes tokens to files, and maps them into memory.

So a text can be larger than memory. A folder has these files:

    train.bin       training tokens, as plain unsigned integers
    validation.bin  validation tokens, in the same form
    tokenizer.json  copy of the tokenizer's file; missing if tokens are bytes
    index.json      sizes and digests of the other files (`Index`)
    .checked.HASH   empty; shows that the files were compared with the digests

Every document ends with the tokenizer's token `end_of_text`. The hash of a
document's content decides whether the document is held out for validation.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import pathlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from dilocox_jax import files
from dilocox_jax.checks import (
  dataclass_from,
  json_file,
  of_type,
  require,
  shown,
  within_limits,
)
from dilocox_jax.data import tokenizers
from dilocox_jax.data.corpus import Corpus, content_is_held_out
from dilocox_jax.data.documents import Document
from dilocox_jax.data.tokenizers import Tokenizer

FORMAT = 4  # Version of the files. A folder of another version is refused.
INDEX = "index.json"
_TOKENIZER = "tokenizer.json"
TRAIN = "train"
VALIDATION = "validation"
_BATCH = 1000  # Number of documents that are encoded and written together.
_CHUNK_BYTES = 2**24  # Bytes that are read at once to compare digests.
_CHECKED = ".checked."  # Start of the name of the file in a checked folder.
# If more bytes than this are compared, a line in the log says so, because it
# takes long.
_SAID_BYTES = 2**30
_PROGRAM = "prepare_data"  # The program in the stamp of a folder of tokens.


def _zero_counts() -> dict[str, int]:
  """Returns a count of 0 for each split."""
  return {TRAIN: 0, VALIDATION: 0}


@dataclasses.dataclass
class Index:
  """Description of the files in a folder of tokens.

  Attributes:
    vocab_size: Size of the vocabulary; every token is below this number.
    tokenizer: Name of the tokenizer.
    end_of_text: Name of the token that ends a document if the user chose it;
      else "".
    documents: Number of documents in both splits together.
    tokens: Number of tokens by split ("train", "validation").
    text_bytes: Number of bytes of text by split. Each end of a document counts
      as one byte.
    parts: Number of training tokens of each part of the text (the files of one
      glob).
    files: SHA-256 of the files with tokens and of a tokenizer's file, by name.
    digest: SHA-256 of `vocab_size` and `files`. It identifies the text.
    index_digest: SHA-256 of all other fields.
    format: Version of the format of such folders.
  """

  vocab_size: int
  tokenizer: str
  end_of_text: str = ""
  documents: int = 0
  tokens: dict = dataclasses.field(default_factory=_zero_counts)
  text_bytes: dict = dataclasses.field(default_factory=_zero_counts)
  parts: list = dataclasses.field(default_factory=list)
  files: dict = dataclasses.field(default_factory=dict)
  digest: str = ""
  index_digest: str = ""
  format: int = FORMAT

  @property
  def dtype(self) -> np.dtype:
    """Dtype of the tokens in the files: little-endian unsigned integers."""
    return np.min_scalar_type(self.vocab_size - 1).newbyteorder("<")

  def text_digest(self) -> str:
    """Computes the SHA-256 of the fields `vocab_size` and `files`."""
    return _hash_of([self.vocab_size, sorted(self.files.items())])

  def own_digest(self) -> str:
    """Computes the SHA-256 of all fields but `index_digest`."""
    return _hash_of(dataclasses.asdict(self) | {"index_digest": ""})


def _hash_of(value: Any) -> str:
  """Returns the SHA-256 of a value that JSON can hold."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write(
  folder: pathlib.Path,
  documents: Iterable[Document],
  tokenizer: Tokenizer,
  validation_fraction: float,
) -> Generator[Index, None, None]:
  """Writes documents as tokens into a folder.

  The files appear in the folder only when all documents are written.

  Args:
    folder: Folder to write to. It is created if it is missing.
    documents: All documents, in the order of their parts.
    tokenizer: Tokenizer that makes the tokens.
    validation_fraction: Share of the documents that is held out for validation,
      above 0 and below 1.

  Yields:
    The index so far, after each batch of documents. It is the same object every
    time. The caller must exhaust the generator; otherwise no file is written.

  Raises:
    ValueError: If one of the files to write exists already, or if a split would
      have no document.
  """
  index = Index(tokenizer.vocab_size, tokenizer.name, tokenizer.end_name)
  folder.mkdir(parents=True, exist_ok=True)
  paths = {split: _file(folder, split) for split in index.tokens}
  for path in (*paths.values(), folder / _TOKENIZER, folder / INDEX):
    is_free = not path.exists()
    require(is_free, f"{path} is there already: remove it, or take another")
  hashes = {split: hashlib.sha256() for split in paths}
  documents = iter(documents)
  with contextlib.ExitStack() as stack:
    open_files = {
      split: stack.enter_context(files.replaced(path))
      for split, path in paths.items()
    }
    while batch := list(itertools.islice(documents, _BATCH)):
      encoded = tokenizer.encode([document.content for document in batch])
      for document, tokens in zip(batch, encoded, strict=True):
        split = TRAIN
        if content_is_held_out(document.content, validation_fraction):
          split = VALIDATION
        # The tokens of the document, with `end_of_text` at the end.
        tokens = np.append(tokens, tokenizer.end_of_text).astype(index.dtype)
        open_files[split].write(tokens.tobytes())
        hashes[split].update(tokens.tobytes())
        _count(index, document, split, tokens.size)
      yield index
    for split, count in index.tokens.items():
      change = "more documents, or another validation fraction"
      require(count > 0, f"{folder} has no {split} text: it needs {change}")
  index.files = {
    paths[split].name: split_hash.hexdigest()
    for split, split_hash in hashes.items()
  }
  if tokenizer.content:
    digest = hashlib.sha256(tokenizer.content).hexdigest()
    index.files[_TOKENIZER] = digest
    with files.replaced(folder / _TOKENIZER) as file:
      file.write(tokenizer.content)
  index.digest = index.text_digest()
  index.index_digest = index.own_digest()
  with files.replaced(folder / INDEX) as file:
    values = dataclasses.asdict(index)
    file.write(json.dumps(values, indent=2, sort_keys=True).encode())


def _count(
  index: Index, document: Document, split: str, num_tokens: int
) -> None:
  """Adds a document and its number of tokens to the counts of an index."""
  index.documents += 1
  index.tokens[split] += num_tokens
  # The end of a document counts as one byte.
  index.text_bytes[split] += len(document.content) + 1
  if split == TRAIN:
    num_new_parts = document.part + 1 - len(index.parts)
    index.parts += [0] * num_new_parts
    index.parts[document.part] += num_tokens


def map_corpus(folder: str) -> Corpus:
  """Maps the tokens of a folder into memory.

  The files are first compared with their digests, unless an earlier process has
  done so.

  Args:
    folder: Folder that `write` has filled.

  Raises:
    ValueError: If the folder has no tokens, if a file is damaged, or if the
      tokenizer needs the extra `text`, which is not installed.
  """
  path = pathlib.Path(os.path.expanduser(folder))
  index = _read_index(path / INDEX)
  _check_stamp(path)
  arrays = {}
  for split, count in index.tokens.items():
    file = _file(path, split)
    size = file.stat().st_size if file.exists() else 0
    expected_size = count * index.dtype.itemsize
    require(
      size == expected_size,
      f"{file} has {size:,} bytes instead of {expected_size:,}: copy the "
      "folder again, or write it anew",
    )
    try:
      arrays[split] = np.memmap(file, index.dtype, "r", shape=(count,))
    except OSError as error:
      reason = error.strerror or error
      raise ValueError(f"{file} cannot be read ({reason})") from error
  _check_files(path, index)
  tokenizer = tokenizers.byte_tokenizer()
  if index.tokenizer != tokenizers.BYTES:
    tokenizer = tokenizers.from_file(str(path / _TOKENIZER), index.end_of_text)
  return Corpus(
    name="shards",
    train=arrays[TRAIN],
    validation=arrays[VALIDATION],
    digest=index.digest[:16],
    vocab_size=index.vocab_size,
    num_files=index.documents,
    bytes_per_token=index.text_bytes[VALIDATION] / index.tokens[VALIDATION],
    tokenizer=tokenizer,
    parts=tuple(index.parts),
  )


def _read_index(path: pathlib.Path) -> Index:
  """Reads the index of a folder; raises ValueError if missing or damaged."""
  require(
    os.path.isfile(path),
    f"{path.parent} holds no tokens that experiments.prepare_data finished",
  )
  try:
    values = json_file(path)
    number = values.get("format")
    require(number == FORMAT, f"it has format {shown(number)}, not {FORMAT}")
    index = dataclass_from(Index, values)
    _check_index(index)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"{path} is damaged ({error}): copy the folder again, or write the tokens"
      " anew"
    ) from None
  return index


def _check_index(index: Index) -> None:
  """Raises an error if an index was changed, or if its fields disagree."""
  is_unchanged = index.index_digest == index.own_digest()
  require(is_unchanged, "its fields are not those that were written")
  within_limits("vocab_size", index.vocab_size, at_least=1, at_most=2**32)
  within_limits("documents", index.documents, at_least=1)
  for name in ("tokens", "text_bytes"):
    counts = getattr(index, name)
    require(counts.keys() == {TRAIN, VALIDATION}, f"{name} lacks a split")
    _check_counts(name, [*counts.values()])
  _check_counts("parts", index.parts)
  require(
    sum(index.parts) == index.tokens[TRAIN],
    "its parts do not add up to its training tokens",
  )
  expected_files = {f"{split}.bin" for split in index.tokens}
  if index.tokenizer != tokenizers.BYTES:
    expected_files.add(_TOKENIZER)
  has_all_files = index.files.keys() == expected_files
  require(has_all_files, "it does not name all files")
  for name, digest in index.files.items():
    of_type(f"files.{name}", digest, str)
  has_digest_of_files = index.digest == index.text_digest()
  require(has_digest_of_files, "its digest is not that of its files")


def _check_counts(name: str, counts: Sequence[Any]) -> None:
  """Raises an error unless each count of a field is an integer above 0."""
  for count in counts:
    within_limits(name, of_type(name, count, int), at_least=1)


def _check_stamp(folder: pathlib.Path) -> None:
  """Raises ValueError if the stamp is damaged, or names another program.

  The stamp is a file that names the program which made the folder. A folder
  without a stamp is accepted.
  """
  stamp = folder / files.STAMP
  if not stamp.exists():
    return
  program = json_file(stamp).get("program")
  require(
    program == _PROGRAM,
    f"{stamp} is damaged, or the folder is not one of tokens: it was made by "
    f"{shown(program)}",
  )


def _check_files(folder: pathlib.Path, index: Index) -> None:
  """Compares all files with their digests, unless this was done before.

  After that it writes an empty file `.checked.HASH`, with which later calls
  compare nothing. Raises ValueError if a file is damaged.
  """
  marker = folder / f"{_CHECKED}{_state_hash(folder, index)}"
  if marker.is_file() and not marker.is_symlink():
    return
  total_bytes = sum((folder / name).stat().st_size for name in index.files)
  if total_bytes > _SAID_BYTES:
    logging.getLogger(__name__).info(
      "comparing %s with the digests of its index, once: %.1f GB",
      folder,
      total_bytes / 1e9,
    )
  for name, digest in index.files.items():
    dtype = None if name == _TOKENIZER else index.dtype
    _check_file(folder / name, digest, dtype, index.vocab_size)
  # A process that must not write into the folder leaves no marker. The next
  # process then compares again.
  with contextlib.suppress(OSError):
    for old_marker in folder.glob(f"{_CHECKED}*"):
      old_marker.unlink()
    with files.replaced(marker):
      pass


def _state_hash(folder: pathlib.Path, index: Index) -> str:
  """Returns 16 hexadecimal digits that change if a file is changed or copied.

  They depend on the index's `digest`, and on the inode number, size and times
  of each file.
  """
  state: list[Any] = [index.digest]
  for name in sorted(index.files):
    try:
      status = (folder / name).stat()
    except OSError as error:
      raise ValueError(
        f"{folder / name} cannot be read ({error.strerror}): copy the folder "
        "again, or write it anew"
      ) from error
    state.append(
      [
        name,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
      ]
    )
  return _hash_of(state)[:16]


def _check_file(
  path: pathlib.Path, digest: str, dtype: np.dtype | None, vocab_size: int
) -> None:
  """Raises ValueError if a file was changed, or has a token that is too high.

  `digest` is the SHA-256 of the content that was written. With a `dtype`, the
  file has tokens, which must be below `vocab_size`.
  """
  content_hash = hashlib.sha256()
  highest_token = -1
  try:
    with path.open("rb") as file:
      while chunk := file.read(_CHUNK_BYTES):
        content_hash.update(chunk)
        if dtype is not None:
          tokens = np.frombuffer(chunk, dtype)
          highest_token = max(highest_token, int(tokens.max()))
  except OSError as error:
    raise ValueError(f"{path} cannot be read ({error.strerror})") from error
  require(
    content_hash.hexdigest() == digest,
    f"{path} is damaged (it is not what {INDEX} says was written): copy the "
    "folder again, or write it anew",
  )
  require(
    highest_token < vocab_size,
    f"{path} has the token {highest_token:,}, but a vocabulary of "
    f"{vocab_size:,}: write it anew",
  )


def _file(folder: pathlib.Path, split: str) -> pathlib.Path:
  """Returns the path of the file with the tokens of a split."""
  return folder / f"{split}.bin"
