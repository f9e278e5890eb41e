"""Turns documents into tokens: bytes, byte-pair encoding, or a user's file.

The tokenizer of bytes needs no package. The other tokenizers need the extra
`text` (`pip install 'dilocox_jax[text]'`). "The library" in this module is the
package `tokenizers` of that extra.

Losses per token can be compared only between runs with the same tokenizer.
Between two tokenizers, compare the losses in bits per byte.
"""

import contextlib
import dataclasses
import hashlib
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

from dilocox_jax.checks import (
  extra_package,
  file_bytes,
  json_object,
  require,
)

Tokens = Integer[np.ndarray, " tokens"]

BYTES = "bytes"
BPE = "bpe"
BPE_VOCAB_SIZE = 1024  # Default number of tokens of "bpe".
# Largest `vocab_size` of "bpe". The library reserves memory for all tokens.
MOST_TOKENS = 2**24
_BATCH = 1000  # Number of documents that are encoded together.
# Usual names of the token between two documents.
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# Largest size of a tokenizer's file. The largest known files have about 2^25.
_MOST_BYTES = 2**28
# Text of a number that stands for no token.
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_LISTED = 12  # Largest number of tokens that a message lists.
# Number of token numbers without a token that every vocabulary may have. Some
# vocabularies keep numbers free for special tokens of later models.
_UNUSED = 1000
# Characters with which the patterns of a tokenizer are tried, beside the
# characters of the patterns themselves (`_check_patterns`).
_PROBES = "aA1 \n.\u4e2d"
_MOST_PROBES = 64  # Largest number of characters that are tried.
_LONGEST_PROBE = 32  # A character is repeated fewer times than this.
_SLOW_S = 0.05  # Time (s) at which a pattern takes too long.


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """Converts text to tokens and back.

  Attributes:
    name: "bytes", "bpe", or the path of a tokenizer.json.
    vocab_size: Number that is one above the highest token.
    end_of_text: The token that is put between two documents.
    encode: Function from a list of UTF-8 documents to a list with an array of
      tokens for each document.
    decode: Function from tokens to text. A number without a token becomes a
      replacement character.
    digest: 16 hexadecimal digits that identify the tokenizer; "" for bytes.
    content: Content of the tokenizer.json; empty for bytes.
    end_name: Name of the token `end_of_text` if the user chose it, else "".
  """

  name: str
  vocab_size: int
  end_of_text: int
  encode: Callable[[Sequence[bytes]], list[Tokens]]
  decode: Callable[[Sequence[int] | Tokens], str]
  digest: str = ""
  content: bytes = b""
  end_name: str = ""

  @property
  def dtype(self) -> np.dtype:
    """Smallest unsigned integer dtype that can hold every token."""
    return np.min_scalar_type(self.vocab_size - 1)


# Function from the training documents to a tokenizer. Only "bpe" reads them.
MakeTokenizer = Callable[[Sequence[bytes]], Tokenizer]


def choose(
  name: str = BYTES, vocab_size: int = BPE_VOCAB_SIZE, end_of_text: str = ""
) -> MakeTokenizer:
  """Returns a function that makes a tokenizer from training documents.

  The returned function raises ValueError if it cannot train or read the
  tokenizer.

  Args:
    name: "bytes", "bpe" (trained on the documents), or the path of a
      tokenizer.json. The last two need the extra `text`.
    vocab_size: Number of tokens of "bpe". Other tokenizers ignore it.
    end_of_text: Name of the token that is put between two documents. It is read
      only for a tokenizer.json. "" means the first of several usual names that
      the file has, e.g. "<|endoftext|>".
  """

  def make(documents: Sequence[bytes]) -> Tokenizer:
    if name == BYTES:
      return byte_tokenizer(documents)
    if name == BPE:
      return trained_bpe(documents, vocab_size)
    return from_file(name, end_of_text)

  return make


def join(tokenizer: Tokenizer, documents: Sequence[bytes]) -> Tokens:
  """Joins the tokens of documents, with `end_of_text` between two documents.

  There must be at least one document.
  """
  end = np.asarray([tokenizer.end_of_text], tokenizer.dtype)
  parts: list[Tokens] = []
  for start in range(0, len(documents), _BATCH):
    for tokens in tokenizer.encode(documents[start : start + _BATCH]):
      parts += [end, tokens]
  # No `end_of_text` comes before the first document.
  return np.concatenate(parts[1:])


def byte_tokenizer(documents: Sequence[bytes] = ()) -> Tokenizer:
  """Returns the tokenizer whose tokens are bytes. The argument is not read.

  A newline is put between two documents.
  """
  del documents

  def encode(documents: Sequence[bytes]) -> list[Tokens]:
    return [np.frombuffer(document, np.uint8) for document in documents]

  def decode(tokens: Sequence[int] | Tokens) -> str:
    # A model may predict numbers above 255. They become the byte 255, which is
    # in no UTF-8 text and therefore becomes a replacement character.
    values = [min(int(token), 255) for token in tokens]
    return bytes(values).decode(errors="replace")

  return Tokenizer(
    name=BYTES,
    vocab_size=256,
    end_of_text=ord("\n"),
    encode=encode,
    decode=decode,
  )


def trained_bpe(documents: Sequence[bytes], vocab_size: int) -> Tokenizer:
  """Trains a tokenizer by byte-level byte-pair encoding.

  There is a token for each of the 256 bytes, so any text can be encoded.

  Args:
    documents: Training documents in UTF-8.
    vocab_size: Number of tokens, at least 257: the bytes, and the token between
      two documents. A short text may give fewer.

  Raises:
    ValueError: If the number of tokens is outside its limits, if the extra
      `text` is not installed, or if a document is not UTF-8.
  """
  require(
    257 <= vocab_size <= MOST_TOKENS,
    f"data.vocab_size={vocab_size} must be at least 257 (256 bytes and the end "
    f"of a document) and at most {MOST_TOKENS}",
  )
  library = extra_package("tokenizers", "data.tokenizer")
  bpe = library.Tokenizer(library.models.BPE())
  bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[_ENDS_OF_TEXT[0]],
    initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  bpe.train_from_iterator(map(_decode_utf8, documents), trainer)
  return _from_json(BPE, bpe.to_str())


def from_file(path: str, end_of_text: str = "") -> Tokenizer:
  """Reads a tokenizer from a tokenizer.json.

  Args:
    path: Path of the file; "~" stands for the user's home directory.
    end_of_text: Name of the token between two documents. "" means the first of
      several usual names that the file has, e.g. "<|endoftext|>".

  Raises:
    ValueError: If the extra `text` is not installed, if the file is missing,
      damaged or no tokenizer, if it has no token of the wanted name, or if it
      has a regular expression that is too slow.
  """
  file = pathlib.Path(path).expanduser()
  problem = "a folder" if file.is_dir() else "no such file"
  require(
    file.is_file(),
    f"data.tokenizer={path}: {problem}; give 'bytes', 'bpe' or a"
    " tokenizer.json",
  )
  with _one_line(path):
    text = file_bytes(file, most=_MOST_BYTES).decode()
  return _from_json(path, text, end_of_text)


def warn_of_changes(tokenizer: Tokenizer, documents: Sequence[bytes]) -> None:
  """Logs a warning if encoding and decoding changes a document.

  The tokenizers "bytes" and "bpe" change nothing, so they are not tried.
  """
  if tokenizer.name in (BYTES, BPE):
    return
  num_changed = 0
  for document, tokens in zip(
    documents, tokenizer.encode(documents), strict=True
  ):
    if tokenizer.decode(tokens).encode() != document:
      num_changed += 1
  if num_changed:
    logging.getLogger(__name__).warning(
      "data.tokenizer=%s gives %d of %d documents back changed: a run learns "
      "the changed text, but its bits a byte count the bytes of the documents",
      tokenizer.name,
      num_changed,
      len(documents),
    )


@contextlib.contextmanager
def _one_line(name: str) -> Iterator[None]:
  """Turns any error in a `with` statement into a ValueError of one line."""
  try:
    yield
  except Exception as error:
    reason = " ".join(str(error).split())
    raise ValueError(f"data.tokenizer={name}: {reason}") from error


def _from_json(name: str, text: str, end_name: str = "") -> Tokenizer:
  """Returns the tokenizer that the text of a tokenizer.json describes.

  Raises ValueError if the text describes none, or `from_file` would refuse it.
  """
  library = extra_package("tokenizers", "data.tokenizer")
  with _one_line(name):
    tokenizer = library.Tokenizer.from_str(text)
  end_of_text = _end_of_text(name, end_name, tokenizer)
  # If a document has the name of a special token in its text, the name is
  # encoded as any other text.
  tokenizer.encode_special_tokens = True
  # A file may ask for texts of one length. A document is kept whole here.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  numbers = tokenizer.get_vocab(with_added_tokens=True)
  vocab_size = _vocab_size(name, numbers)
  known_numbers = frozenset(numbers.values())
  _check_patterns(name, text, tokenizer)
  dtype = np.min_scalar_type(vocab_size - 1)

  def encode(documents: Sequence[bytes]) -> list[Tokens]:
    texts = list(map(_decode_utf8, documents))
    with _one_line(name):
      encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.asarray(encoding.ids, dtype) for encoding in encodings]

  def decode(tokens: Sequence[int] | Tokens) -> str:
    # A model may predict numbers that the tokenizer lacks. The library would
    # silently leave them out. So the tokens between such numbers are decoded
    # one piece after the other.
    pieces: list[list[int]] = [[]]
    for token in map(int, tokens):
      if token in known_numbers:
        pieces[-1].append(token)
      else:
        pieces.append([])
    with _one_line(name):
      return _UNKNOWN.join(map(tokenizer.decode, pieces))

  content = text.encode()
  digest = hashlib.sha256(content + end_name.encode()).hexdigest()[:16]
  return Tokenizer(
    name=name,
    vocab_size=vocab_size,
    end_of_text=end_of_text,
    encode=encode,
    decode=decode,
    digest=digest,
    content=content,
    end_name=end_name,
  )


def _vocab_size(name: str, numbers: Mapping[str, int]) -> int:
  """Returns the number that is one above the highest token number.

  Raises ValueError if two tokens have one number, or if too many numbers below
  the highest have no token: more than 1,000, and also more than a tenth of the
  number of tokens.
  """
  by_number: dict[int, str] = {}
  for token, number in sorted(numbers.items()):
    other = by_number.setdefault(number, token)
    require(
      other == token,
      f"data.tokenizer={name} is damaged: the tokens {other!r} and {token!r} "
      f"have one number, {number}",
    )
  highest = max(by_number)
  num_tokens = len(by_number)
  num_unused = highest + 1 - num_tokens
  require(
    num_unused <= max(_UNUSED, num_tokens // 10),
    f"data.tokenizer={name} is damaged: it has {num_tokens:,} tokens, but "
    f"{by_number[highest]!r} has the number {highest:,}",
  )
  return highest + 1


def _check_patterns(name: str, text: str, tokenizer: Any) -> None:
  """Raises ValueError if a regular expression takes exponential time.

  An example is "(a+)+$": each further "a" in "aaaa!" doubles the time. So this
  function tries the texts "a!", "aa!", "aaa!" and so on, and such texts with
  other characters than "a".
  """
  patterns = _patterns(json_object(text, name, is_ours=False))
  if not patterns:
    return
  # `_PROBES` come first, as they are always tried.
  characters = [*dict.fromkeys([*_PROBES, *sorted("".join(patterns))])]
  for character in characters[:_MOST_PROBES]:
    for count in range(1, _LONGEST_PROBE):
      # Unlike the time of the clock, the time of this thread does not depend
      # on other processes.
      start_s = time.thread_time()
      with _one_line(name):
        tokens = tokenizer.encode(
          f"{character * count}!", add_special_tokens=False
        )
        tokenizer.decode(tokens.ids)
      require(
        time.thread_time() - start_s < _SLOW_S,
        f"data.tokenizer={name} takes too long for {count} times {character!r} "
        "and would wait for ever for more: one of its patterns repeats what "
        "is repeated already",
      )


def _patterns(value: Any) -> list[str]:
  """Returns all regular expressions in the JSON value of a tokenizer.json.

  A regular expression is the field "Regex" of an object at any depth.
  """
  patterns = []
  inner_values = []
  if isinstance(value, list):
    inner_values = value
  if isinstance(value, dict):
    if isinstance(value.get("Regex"), str):
      patterns.append(value["Regex"])
    inner_values = value.values()
  for inner_value in inner_values:
    patterns += _patterns(inner_value)
  return patterns


def _end_of_text(name: str, end_name: str, tokenizer: Any) -> int:
  """Returns the number of the token between two documents, by its name.

  The name "" stands for the first entry of `_ENDS_OF_TEXT` that exists. Raises
  ValueError if there is no such token.
  """
  names = [end_name] if end_name else _ENDS_OF_TEXT
  for token in names:
    number = tokenizer.token_to_id(token)
    if number is not None:
      return number
  special_tokens = [
    token.content for token in tokenizer.get_added_tokens_decoder().values()
  ]
  have = ", ".join(special_tokens[:_LISTED]) or "none that are special"
  if end_name:
    raise ValueError(
      f"data.end_of_text={end_name!r} is no token of {name}: name one that it"
      f" has ({have})"
    )
  raise ValueError(
    f"data.tokenizer={name} has no token for the end of a document whose name "
    f"is known ({', '.join(_ENDS_OF_TEXT)}): name one of its tokens ({have}) "
    "with data.end_of_text"
  )


def _decode_utf8(document: bytes) -> str:
  """Returns the text of a document; raises ValueError if it is not UTF-8."""
  try:
    return document.decode()
  except UnicodeDecodeError as error:
    raise ValueError(
      f"the document that begins with {document[:20]!r} is no text in UTF-8 "
      f"({error}): convert it, or take data.tokenizer=bytes"
    ) from None
