"""A corpus parts its training text from its validation text by file.

A loss means something only beside the text it was measured on, so a corpus
carries a digest of its files, and every reported loss can name it. Which part
a file belongs to depends on its own path alone: a validation file stays one
when the corpus grows. A tokeniser would take the place of the bytes here.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Integer

VALIDATION_FRACTION = 0.05

_BYTE_VOCAB_SIZE = 256
# One separator keeps the last word of a file from running into the next file;
# a newline does for bytes, a tokeniser would use its end-of-text token.
_SEPARATOR = b"\n"


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Tokens in two parts that share no file.

  Attributes:
    name: The source, one of `sources.SOURCES`.
    train: Tokens to learn from; uint8 where the vocabulary allows, else int32.
    validation: Tokens held out; the same type.
    digest: 16 hex digits that name the content.
    vocab_size: Tokens are below this.
    num_files: Files read; 0 where there are none.
  """

  name: str
  train: Integer[np.ndarray, " train_tokens"]
  validation: Integer[np.ndarray, " validation_tokens"]
  digest: str
  vocab_size: int
  num_files: int


def digest_of(files: Mapping[str, bytes]) -> str:
  """Names a set of files by their paths and content, in whatever order.

  Args:
    files: Relative path to content.

  Returns:
    16 hex digits.
  """
  whole = hashlib.sha256()
  for path, content in sorted(files.items()):
    # Hashes have one length, so no path can pass for a piece of content.
    whole.update(hashlib.sha256(path.encode(errors="surrogateescape")).digest())
    whole.update(hashlib.sha256(content).digest())
  return whole.hexdigest()[:16]


def is_held_out(path: str, validation_fraction: float) -> bool:
  """Says whether a file belongs to the validation part.

  Args:
    path: Path relative to the corpus' root, with forward slashes.
    validation_fraction: Share of the files held out.

  Returns:
    True for validation, False for training.
  """
  head = hashlib.sha256(path.encode(errors="surrogateescape")).digest()[:8]
  return int.from_bytes(head, "big") < validation_fraction * 2**64


def from_files(
  name: str, files: Mapping[str, bytes], validation_fraction: float
) -> Corpus:
  """Parts files into training and validation bytes.

  Args:
    name: The source.
    files: Relative path to content.
    validation_fraction: Share of the files held out.

  Returns:
    The bytes of each part's files in the order of their paths, a newline
    between two files.

  Raises:
    ValueError: One part has no text.
  """
  check_fraction(validation_fraction)
  paths = sorted(files)
  held_out = [p for p in paths if is_held_out(p, validation_fraction)]
  # A copy of a validation file under another name would leak it.
  seen = {files[p] for p in held_out}
  train = _join(files[p] for p in paths if files[p] not in seen)
  validation = _join(files[p] for p in held_out)
  if not train.size or not validation.size:
    part, change = (
      ("validation", "raise") if train.size else ("training", "lower")
    )
    raise ValueError(
      f"{name} has no {part} text: validation_fraction={validation_fraction}"
      f" puts {len(held_out)} of {len(files)} files in validation; more files"
      f" are needed, or {change} validation_fraction"
    )
  return Corpus(
    name, train, validation, digest_of(files), _BYTE_VOCAB_SIZE, len(files)
  )


def check_fraction(validation_fraction: float) -> None:
  """Raises ValueError unless both parts get a share."""
  if not 0 < validation_fraction < 1:
    raise ValueError(
      f"validation_fraction={validation_fraction} must lie above 0 and below 1"
    )


def _join(contents: Iterator[bytes]) -> np.ndarray:
  whole = _SEPARATOR.join(content for content in contents if content)
  return np.frombuffer(whole, np.uint8)
