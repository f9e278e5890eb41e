"""Turns documents into tokens: bytes, byte-pair encoding, or a given file.

Bytes need no package. The others need the extra `text`
(`pip install 'dilocox_jax[text]'`), which is imported when it is used.

A tokenizer has a digest, because a loss per token means something only together
with the tokens. Losses under two tokenizers are compared in bits per byte.
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
BPE_VOCAB_SIZE = 1024
# The library reserves memory for as many tokens as are asked for.
MOST_TOKENS = 2**24
_BATCH = 1000  # Documents that are encoded together.
# Names that tokenizers give the token between two documents.
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MOST_BYTES = 2**28  # Of a tokenizer's file; the largest have about 2^25.
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # In place of what is no token.
_LISTED = 12  # Tokens that a message lists at most.
# Numbers without a token that a vocabulary may have: some leave room for
# special tokens of others. More than that is damage.
_UNUSED = 1000
# What patterns are tried with, beside the characters that they have.
_PROBES = "aA1 \n.\u4e2d"
_MOST_PROBES = 64
_LONGEST_PROBE = 32
_SLOW_S = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """Functions from text to tokens and back.

  Attributes:
    name: "bytes", "bpe", or the path that was given.
    vocab_size: Number of different tokens; every token is below it.
    end_of_text: The token that is put between two documents.
    encode: Function from UTF-8 documents to one array of tokens each.
    decode: Function from tokens to text.
    digest: 16 hex digits that name the tokenizer; empty for bytes.
    content: Content of the file that describes it; empty for bytes.
    end_name: Name of `end_of_text` if it was asked for, else empty.
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
    """Smallest unsigned type that holds every token."""
    return np.min_scalar_type(self.vocab_size - 1)


MakeTokenizer = Callable[[Sequence[bytes]], Tokenizer]


def choose(
  name: str = BYTES, vocab_size: int = BPE_VOCAB_SIZE, end_of_text: str = ""
) -> MakeTokenizer:
  """Returns a function from training documents to the tokenizer of a name.

  Args:
    name: "bytes", "bpe" (trained on the documents), or the path of a
      tokenizer.json.
    vocab_size: Number of tokens of "bpe".
    end_of_text: Token of a file that is put between two documents; "" takes
      the one whose name is known.
  """

  def make(documents: Sequence[bytes]) -> Tokenizer:
    if name == BYTES:
      return byte_tokenizer(documents)
    if name == BPE:
      return trained_bpe(documents, vocab_size)
    return from_file(name, end_of_text)

  return make


def join(tokenizer: Tokenizer, documents: Sequence[bytes]) -> Tokens:
  """Returns the tokens of documents, an end of a text between two of them.

  Args:
    tokenizer: Makes the tokens.
    documents: At least one.
  """
  end = np.asarray([tokenizer.end_of_text], tokenizer.dtype)
  parts: list[Tokens] = []
  for start in range(0, len(documents), _BATCH):
    for tokens in tokenizer.encode(documents[start : start + _BATCH]):
      parts += [end, tokens]
  return np.concatenate(parts[1:])


def byte_tokenizer(documents: Sequence[bytes] = ()) -> Tokenizer:
  """Returns the tokenizer whose tokens are the bytes; a newline ends a text.

  Args:
    documents: Training documents, which it does not need.
  """
  del documents

  def encode(documents: Sequence[bytes]) -> list[Tokens]:
    return [np.frombuffer(document, np.uint8) for document in documents]

  def decode(tokens: Sequence[int] | Tokens) -> str:
    # A model may have more tokens. No text has the byte 255.
    known = [min(int(token), 255) for token in tokens]
    return bytes(known).decode(errors="replace")

  return Tokenizer(BYTES, 256, ord("\n"), encode, decode)


def trained_bpe(documents: Sequence[bytes], vocab_size: int) -> Tokenizer:
  """Trains byte-level byte-pair encoding.

  The first 256 tokens stand for the bytes, so any text can be encoded. The same
  documents give the same tokens.

  Args:
    documents: Training documents.
    vocab_size: Number of tokens, at least 257: the bytes and the end of a text.
  """
  require(
    257 <= vocab_size <= MOST_TOKENS,
    f"data.vocab_size={vocab_size} must be at least 257 (256 bytes and the end "
    f"of a document) and at most {MOST_TOKENS}",
  )
  library = extra_package("tokenizers", "data.tokenizer")
  made = library.Tokenizer(library.models.BPE())
  made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[_ENDS_OF_TEXT[0]],
    initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(map(_text, documents), trainer)
  return _from_text(BPE, made.to_str())


def from_file(path: str, end_of_text: str = "") -> Tokenizer:
  """Reads a tokenizer.json.

  Args:
    path: The file.
    end_of_text: The token between two documents; "" takes the one whose name
      is known.

  Raises:
    ValueError: If there is no such file, it is no tokenizer, or it has no token
      for the end of a document. The message is one line.
  """
  file = pathlib.Path(path).expanduser()
  require(
    file.is_file(),
    f"data.tokenizer={path}: {'a folder' if file.is_dir() else 'no such file'};"
    " give 'bytes', 'bpe' or a tokenizer.json",
  )
  with _one_line(path):
    text = file_bytes(file, most=_MOST_BYTES).decode()
  return _from_text(path, text, end_of_text)


def warn_of_changes(tokenizer: Tokenizer, documents: Sequence[bytes]) -> None:
  """Warns if a tokenizer does not give documents back as they are.

  Args:
    tokenizer: Bytes and "bpe" give everything back, a file often not.
    documents: Some of the documents.
  """
  if tokenizer.name in (BYTES, BPE):
    return
  encoded = tokenizer.encode(documents)
  pairs = zip(documents, map(tokenizer.decode, encoded), strict=True)
  changed = sum(before != after.encode() for before, after in pairs)
  if changed:
    logging.getLogger(__name__).warning(
      "data.tokenizer=%s gives %d of %d documents back changed, so a run "
      "learns another text than was read, whose bytes bits a byte count",
      *(tokenizer.name, changed, len(documents)),
    )


@contextlib.contextmanager
def _one_line(name: str) -> Iterator[None]:
  """Turns what the library raises, which may be anything, into one line."""
  try:
    yield
  except Exception as error:
    reason = " ".join(str(error).split())
    raise ValueError(f"data.tokenizer={name}: {reason}") from error


def _from_text(name: str, text: str, end_name: str = "") -> Tokenizer:
  """Returns the tokenizer that a tokenizer.json describes."""
  library = extra_package("tokenizers", "data.tokenizer")
  with _one_line(name):
    made = library.Tokenizer.from_str(text)
  end = _end(name, end_name, made)
  # A document that has the name of a special token in its text keeps it there.
  made.encode_special_tokens = True
  # A file may ask for texts of one length. A document is kept whole here.
  made.no_truncation()
  made.no_padding()
  numbers = made.get_vocab(with_added_tokens=True)
  size = _vocab_size(name, numbers)
  known = frozenset(numbers.values())
  _check_patterns(name, text, made)
  dtype = np.min_scalar_type(size - 1)

  def encode(documents: Sequence[bytes]) -> list[Tokens]:
    texts = list(map(_text, documents))
    with _one_line(name):
      encoded = made.encode_batch(texts, add_special_tokens=False)
    return [np.asarray(one.ids, dtype) for one in encoded]

  def decode(tokens: Sequence[int] | Tokens) -> str:
    # A model may have more tokens. The library would leave them out in silence.
    pieces: list[list[int]] = [[]]
    for token in map(int, tokens):
      if token in known:
        pieces[-1].append(token)
      else:
        pieces.append([])
    with _one_line(name):
      return _UNKNOWN.join(map(made.decode, pieces))

  content = text.encode()
  digest = hashlib.sha256(content + end_name.encode()).hexdigest()[:16]
  return Tokenizer(name, size, end, encode, decode, digest, content, end_name)


def _vocab_size(name: str, numbers: Mapping[str, int]) -> int:
  """Returns the number above all tokens, which may have gaps between them.

  Args:
    name: Name of the tokenizer, for messages.
    numbers: The number of each token.

  Raises:
    ValueError: If two tokens have one number, or most numbers have no token.
  """
  by_number: dict[int, str] = {}
  for token, number in sorted(numbers.items()):
    other = by_number.setdefault(number, token)
    require(
      other == token,
      f"data.tokenizer={name} is damaged: the tokens {other!r} and {token!r} "
      f"have one number, {number}",
    )
  size = 1 + max(by_number)
  unused = size - len(by_number)
  require(
    unused <= max(_UNUSED, len(by_number) // 10),
    f"data.tokenizer={name} is damaged: it has {len(by_number):,} tokens, but "
    f"{by_number[size - 1]!r} has the number {size - 1:,}",
  )
  return size


def _check_patterns(name: str, text: str, made) -> None:
  """Refuses patterns that take a time exponential in the length of a text.

  Such a pattern is "(a+)+$": each further "a" in "aaaa!" doubles the time. So
  texts of a character, each one longer, are encoded until one takes too long.
  That is no longer than twice the limit, and for usual patterns next to no time
  at all.

  Args:
    name: Name of the tokenizer, for the message.
    text: Its file.
    made: The tokenizer.
  """
  patterns = _patterns(json_object(text, name, is_ours=False))
  if not patterns:
    return
  characters = sorted({*_PROBES, *"".join(patterns)})
  for character in characters[:_MOST_PROBES]:
    for count in range(1, _LONGEST_PROBE):
      # Other processes do not make the time of this thread longer.
      start_s = time.thread_time()
      with _one_line(name):
        tokens = made.encode(f"{character * count}!", add_special_tokens=False)
        made.decode(tokens.ids)
      require(
        time.thread_time() - start_s < _SLOW_S,
        f"data.tokenizer={name} takes too long for {count} times {character!r} "
        "and would wait for ever for more: one of its patterns repeats what "
        "is repeated already",
      )


def _patterns(value: Any) -> list[str]:
  """Returns the regular expressions of a tokenizer.json."""
  if isinstance(value, list):
    return [found for inner in value for found in _patterns(inner)]
  if not isinstance(value, dict):
    return []
  own = [value["Regex"]] if isinstance(value.get("Regex"), str) else []
  return own + [found for x in value.values() for found in _patterns(x)]


def _end(name: str, given: str, made) -> int:
  """Returns the number of the token between documents."""
  for token in (given,) if given else _ENDS_OF_TEXT:
    if (number := made.token_to_id(token)) is not None:
      return number
  special = [t.content for t in made.get_added_tokens_decoder().values()]
  have = ", ".join(special[:_LISTED]) or "none that are special"
  if given:
    raise ValueError(
      f"data.end_of_text={given!r} is no token of {name}: name one that it has "
      f"({have})"
    )
  raise ValueError(
    f"data.tokenizer={name} has no token for the end of a document whose name "
    f"is known ({', '.join(_ENDS_OF_TEXT)}): name one of its tokens ({have}) "
    "with data.end_of_text"
  )


def _text(document: bytes) -> str:
  try:
    return document.decode()
  except UnicodeDecodeError as error:
    raise ValueError(
      f"the document that begins with {document[:20]!r} is no text in UTF-8 "
      f"({error}): convert it, or take data.tokenizer=bytes"
    ) from None
