"""Tokens in files that are mapped into memory, for text larger than memory.

A folder has the tokens of each split as one plain file of unsigned integers,
and an index that says what they are, beside a copy of the tokenizer's file:

    train.bin  validation.bin  tokenizer.json  index.json

Every document ends with the tokenizer's end of a text. A document is held out
for validation by the hash of its content, so copies of it never lie in both
splits.

The index has a digest of each file, and one of itself. Whoever maps a folder
for the first time reads all of it and compares them: 0.9 GB a second on a core.
An empty file `.checked.HASH` then says so. HASH names the files as the system
knows them (number, size, times), so a copy or a change is checked again.
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

FORMAT = 4
INDEX = "index.json"
_TOKENIZER = "tokenizer.json"
TRAIN = "train"
VALIDATION = "validation"
_BATCH = 1000  # Documents that are encoded and written together.
_CHUNK_BYTES = 2**24  # Read at once to compare digests.
_CHECKED = ".checked."  # Begin of the name of the file that says so.
_SAID_BYTES = 2**30  # To check more takes long enough for a line in the log.
_PROGRAM = "prepare_data"


def _none_of_both() -> dict[str, int]:
  return {TRAIN: 0, VALIDATION: 0}


@dataclasses.dataclass
class Index:
  """What the files of a folder are.

  Attributes:
    vocab_size: Number of different tokens; every token is below it.
    tokenizer: Name of the tokenizer.
    end_of_text: Name of its end of a text, if it was asked for.
    documents: Documents that were written.
    tokens: Tokens by split.
    text_bytes: Bytes of text by split, one for each end of a text included.
    parts: Training tokens of each part.
    files: SHA-256 of each file beside the index, by its name.
    digest: Hash that names the text: tokens, their number and the tokenizer.
    index_digest: Hash of all other fields.
    format: Number of this form of files.
  """

  vocab_size: int
  tokenizer: str
  end_of_text: str = ""
  documents: int = 0
  tokens: dict = dataclasses.field(default_factory=_none_of_both)
  text_bytes: dict = dataclasses.field(default_factory=_none_of_both)
  parts: list = dataclasses.field(default_factory=list)
  files: dict = dataclasses.field(default_factory=dict)
  digest: str = ""
  index_digest: str = ""
  format: int = FORMAT

  @property
  def dtype(self) -> np.dtype:
    """Type of the tokens in the files."""
    return np.min_scalar_type(self.vocab_size - 1).newbyteorder("<")

  def text_digest(self) -> str:
    """Returns what `digest` should be."""
    return _hash_of([self.vocab_size, sorted(self.files.items())])

  def own_digest(self) -> str:
    """Returns what `index_digest` should be."""
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
  """Writes documents as tokens, and yields the index after each batch.

  Files have their names once all is written. So what was interrupted is no
  folder of tokens, and begins anew.

  Args:
    folder: Where to write; made if missing.
    documents: All documents, in the order of their parts.
    tokenizer: Makes the tokens.
    validation_fraction: Share of the documents that is held out, above 0 and
      below 1.

  Raises:
    ValueError: If the folder holds other tokens or files, or a split has no
      document. The message is one line.
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
    opened = {k: stack.enter_context(files.replaced(paths[k])) for k in paths}
    while batch := list(itertools.islice(documents, _BATCH)):
      encoded = tokenizer.encode([document.content for document in batch])
      for document, tokens in zip(batch, encoded, strict=True):
        content = document.content
        is_held = content_is_held_out(content, validation_fraction)
        split = VALIDATION if is_held else TRAIN
        ended = np.append(tokens, tokenizer.end_of_text).astype(index.dtype)
        opened[split].write(ended.tobytes())
        hashes[split].update(ended.tobytes())
        _count(index, document, split, ended.size)
      yield index
    for split, count in index.tokens.items():
      change = "more documents, or another validation fraction"
      require(count > 0, f"{folder} has no {split} text: it needs {change}")
  index.files = {paths[k].name: x.hexdigest() for k, x in hashes.items()}
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


def _count(index: Index, document: Document, split: str, size: int) -> None:
  """Adds a document of so many tokens to an index."""
  index.documents += 1
  index.tokens[split] += size
  index.text_bytes[split] += len(document.content) + 1
  if split == TRAIN:
    index.parts += [0] * (document.part + 1 - len(index.parts))
    index.parts[document.part] += size


def map_corpus(folder: str) -> Corpus:
  """Maps the tokens of a folder, which are compared with their digest once.

  Args:
    folder: What `write` finished.

  Raises:
    ValueError: If it is no such folder, or a file is damaged. The message is
      one line.
  """
  path = pathlib.Path(os.path.expanduser(folder))
  index = _read(path / INDEX)
  _check_stamp(path)
  arrays = {}
  made = tokenizers.byte_tokenizer()
  for split, count in index.tokens.items():
    file = _file(path, split)
    size = file.stat().st_size if file.exists() else 0
    whole = count * index.dtype.itemsize
    require(
      size == whole,
      f"{file} has {size:,} bytes instead of {whole:,}: copy the folder again, "
      "or write it anew",
    )
    try:
      arrays[split] = np.memmap(file, index.dtype, "r", shape=(count,))
    except OSError as error:
      reason = error.strerror or error
      raise ValueError(f"{file} cannot be read ({reason})") from error
  _check_files(path, index)
  if index.tokenizer != tokenizers.BYTES:
    given = str(path / _TOKENIZER), index.end_of_text
    made = tokenizers.from_file(*given)
  return Corpus(
    "shards",
    arrays[TRAIN],
    arrays[VALIDATION],
    index.digest[:16],
    index.vocab_size,
    index.documents,
    index.text_bytes[VALIDATION] / index.tokens[VALIDATION],
    made,
    tuple(index.parts),
  )


def _read(path: pathlib.Path) -> Index:
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
  """Raises ValueError if an index contradicts itself."""
  is_whole = index.index_digest == index.own_digest()
  require(is_whole, "its fields are not those that were written")
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
  named = {f"{split}.bin" for split in index.tokens}
  if index.tokenizer != tokenizers.BYTES:
    named.add(_TOKENIZER)
  require(index.files.keys() == named, "it does not name all files")
  for name, digest in index.files.items():
    of_type(f"files.{name}", digest, str)
  is_named = index.digest == index.text_digest()
  require(is_named, "its digest is not that of its files")


def _check_counts(name: str, counts: Sequence[Any]) -> None:
  for count in counts:
    within_limits(name, of_type(name, count, int), at_least=1)


def _check_stamp(folder: pathlib.Path) -> None:
  """Refuses a folder whose stamp is damaged, or is that of another program.

  Nothing is read from the stamp. But what damaged it may have damaged more.
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
  """Compares all files with their digests, unless that was done before."""
  marker = folder / f"{_CHECKED}{_state(folder, index)}"
  if marker.is_file() and not marker.is_symlink():
    return
  total = sum((folder / name).stat().st_size for name in index.files)
  if total > _SAID_BYTES:
    logging.getLogger(__name__).info(
      "comparing %s with the digests of its index, once: %.1f GB",
      folder,
      total / 1e9,
    )
  for name, digest in index.files.items():
    dtype = None if name == _TOKENIZER else index.dtype
    _check_file(folder / name, digest, dtype, index.vocab_size)
  # Whoever may only read the folder checks it each time.
  with contextlib.suppress(OSError):
    for old in folder.glob(f"{_CHECKED}*"):
      old.unlink()
    with files.replaced(marker):
      pass


def _state(folder: pathlib.Path, index: Index) -> str:
  """Names the files of a folder as the system knows them.

  The time of the last change of a file's entry and the number of that entry
  tell a copy from its original, even if the copy keeps the time of its content.
  """
  state: list[Any] = [index.digest]
  for name in sorted(index.files):
    try:
      found = (folder / name).stat()
    except OSError as error:
      raise ValueError(
        f"{folder / name} cannot be read ({error.strerror}): copy the folder "
        "again, or write it anew"
      ) from error
    times = found.st_mtime_ns, found.st_ctime_ns
    state.append([name, found.st_ino, found.st_size, *times])
  return _hash_of(state)[:16]


def _check_file(
  path: pathlib.Path, digest: str, dtype: np.dtype | None, vocab_size: int
) -> None:
  """Raises ValueError if a file is not the one that was written.

  Args:
    path: The file.
    digest: SHA-256 of what was written.
    dtype: Type of its tokens; None if it has none.
    vocab_size: Number of different tokens.
  """
  whole = hashlib.sha256()
  highest = -1
  try:
    with path.open("rb") as file:
      while chunk := file.read(_CHUNK_BYTES):
        whole.update(chunk)
        if dtype is not None:
          highest = max(highest, int(np.frombuffer(chunk, dtype).max()))
  except OSError as error:
    raise ValueError(f"{path} cannot be read ({error.strerror})") from error
  require(
    whole.hexdigest() == digest,
    f"{path} is damaged (it is not what {INDEX} says was written): copy the "
    "folder again, or write it anew",
  )
  require(
    highest < vocab_size,
    f"{path} has the token {highest:,}, but a vocabulary of {vocab_size:,}: "
    "write it anew",
  )


def _file(folder: pathlib.Path, split: str) -> pathlib.Path:
  return folder / f"{split}.bin"
