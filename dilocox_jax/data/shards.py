"""Tokens in files that are mapped into memory, for text larger than memory.

A folder has the tokens of each split as one plain file of unsigned integers,
and an index that says what they are, beside a copy of the tokenizer's file:

    train.bin  validation.bin  tokenizer.json  index.json

Every document ends with the tokenizer's end of a text. A document is held out
for validation by the hash of its content, so copies of it never lie in both
splits.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Generator, Iterable

import numpy as np

from dilocox_jax import files
from dilocox_jax.checks import dataclass_from, json_object, of_type, require
from dilocox_jax.data import tokenizers
from dilocox_jax.data.corpus import Corpus, content_is_held_out
from dilocox_jax.data.documents import Document
from dilocox_jax.data.tokenizers import Tokenizer

FORMAT = 3
INDEX, _TOKENIZER = "index.json", "tokenizer.json"
TRAIN, VALIDATION = "train", "validation"
_BATCH = 1000  # Documents that are encoded and written together.


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
    digest: Hash of all tokens.
    format: Number of this form of files.
  """

  vocab_size: int
  tokenizer: str
  end_of_text: str = ""
  documents: int = 0
  tokens: dict = dataclasses.field(default_factory=_none_of_both)
  text_bytes: dict = dataclasses.field(default_factory=_none_of_both)
  parts: list = dataclasses.field(default_factory=list)
  digest: str = ""
  format: int = FORMAT

  @property
  def dtype(self) -> np.dtype:
    """Type of the tokens in the files."""
    return np.min_scalar_type(self.vocab_size - 1).newbyteorder("<")


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
  for path in (*paths.values(), folder / INDEX):
    is_free = not path.exists()
    require(is_free, f"{path} is there already: remove it, or take another")
  whole, documents = hashlib.sha256(), iter(documents)
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
        whole.update(split.encode() + ended.tobytes())
        _count(index, document, split, ended.size)
      yield index
    for split, count in index.tokens.items():
      change = "more documents, or another validation fraction"
      require(count > 0, f"{folder} has no {split} text: it needs {change}")
  index.digest = whole.hexdigest()
  if tokenizer.content:
    with files.replaced(folder / _TOKENIZER) as file:
      file.write(tokenizer.content)
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
  """Maps the tokens of a folder; nothing but the index is read.

  Args:
    folder: What `write` finished.

  Raises:
    ValueError: If it is no such folder, or a file is too short or too long.
      The message is one line.
  """
  path = pathlib.Path(os.path.expanduser(folder))
  index = _read(path / INDEX)
  arrays, made = {}, tokenizers.byte_tokenizer()
  for split, count in index.tokens.items():
    file = _file(path, split)
    size = file.stat().st_size if file.exists() else 0
    whole = count * index.dtype.itemsize
    require(
      size == whole > 0,
      f"{file} has {size:,} bytes instead of {whole:,}: copy the folder again, "
      "or write it anew",
    )
    arrays[split] = np.memmap(file, index.dtype, "r", shape=(count,))
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
    values = json_object(path.read_bytes(), "it")
    number = values.get("format")
    require(number == FORMAT, f"it has format {number!r}, not {FORMAT}")
    found = dataclass_from(Index, values)
    counts = [
      each[k] for each in (found.tokens, found.text_bytes) for k in each
    ]
    for count in (*counts, *found.parts):
      of_type("a count", count, int)
    require(len(counts) == 4, "a count is missing")
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(
      f"{path} is damaged ({error}): copy the folder again, or write the tokens"
      " anew"
    ) from None
  return found


def _file(folder: pathlib.Path, split: str) -> pathlib.Path:
  return folder / f"{split}.bin"
