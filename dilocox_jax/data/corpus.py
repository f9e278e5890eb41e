"""Splits a set of files into text to train, to choose and to judge.

A loss means something only together with the text it was measured on. So a
corpus has a digest of its files, and every reported loss can name it. A file
goes to training or validation by its own path alone. So a validation file
stays one when other files are added. A share of the validation files may be
set aside to judge: settings are chosen by the others, and a loss on which no
choice was made is that of a text that nobody has looked at before.
"""

import dataclasses
import hashlib
import itertools
import types
from collections.abc import Mapping

import numpy as np
from jaxtyping import Integer

from dilocox_jax.checks import require
from dilocox_jax.data import tokenizers
from dilocox_jax.data.tokenizers import MakeTokenizer, Tokenizer

VALIDATION_FRACTION = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Tokens to train, to choose and to judge, with no file in common.

  Attributes:
    name: Name of the source, one of `sources.SOURCES`.
    train: Training tokens [train_tokens], of any integer type.
    validation: Validation tokens [validation_tokens] of the same dtype.
    digest: 16 hex digits that name the content.
    vocab_size: Number of different tokens; every token is below it.
    num_files: Number of files read; 0 for a source without files.
    bytes_per_token: Bytes of the validation text over its tokens. A loss in
      nats a token, divided by this and by ln 2, is in bits a byte. None if the
      tokens stand for no bytes.
    tokenizer: What made the tokens; None if nothing did.
    parts: Training tokens of each glob, in order; a mix of parts needs them.
    judge: Held-out tokens that only the last evaluation of a run reads; None if
      all held-out text is in `validation`.
  """

  name: str
  train: Integer[np.ndarray, " train_tokens"]
  validation: Integer[np.ndarray, " validation_tokens"]
  digest: str
  vocab_size: int
  num_files: int
  bytes_per_token: float | None = None
  tokenizer: Tokenizer | None = None
  parts: tuple[int, ...] = ()
  judge: Integer[np.ndarray, " judge_tokens"] | None = None

  def __repr__(self) -> str:
    """Says on one line how large the texts are, without their tokens."""
    return (
      f"Corpus({self.name}, {self.train.size:,} training and "
      f"{self.validation.size:,} validation tokens below {self.vocab_size:,}, "
      f"digest {self.digest})"
    )


def digest_of(files: Mapping[str, bytes]) -> str:
  """Returns 16 hex digits that name a set of files, in any order.

  Args:
    files: Content of each file by its relative path.
  """
  whole = hashlib.sha256()
  for path, content in sorted(files.items()):
    # Every hash has the same length, so {"ab": b"c"} and {"a": b"bc"} differ.
    whole.update(hashlib.sha256(path.encode(errors="surrogateescape")).digest())
    whole.update(hashlib.sha256(content).digest())
  return whole.hexdigest()[:16]


def is_held_out(path: str, validation_fraction: float) -> bool:
  """Returns whether a file belongs to the validation text.

  The hash of the path, read as a number from 0 to 1, is compared with the
  fraction. Example: "a.txt" has 0.097 and "ast.py" has 0.707. With the fraction
  0.1 only "a.txt" is held out, with 0.8 both are. So a larger fraction holds
  out every file that a smaller one does.

  Args:
    path: Path relative to the root of the corpus, with forward slashes.
    validation_fraction: Share of the files held out, above 0 and below 1.
  """
  head = hashlib.sha256(path.encode(errors="surrogateescape")).digest()[:8]
  return int.from_bytes(head, "big") < validation_fraction * 2**64


def from_files(
  name: str,
  files: Mapping[str, bytes],
  validation_fraction: float,
  tokenizer: MakeTokenizer = tokenizers.byte_tokenizer,
  part_of: Mapping[str, int] = types.MappingProxyType({}),
  judge_fraction: float = 0.0,
) -> Corpus:
  """Splits files into training, validation and judging tokens.

  Args:
    name: Name of the source.
    files: Content of each file, or of each document, by its name.
    validation_fraction: Share of the files held out, above 0 and below 1.
    tokenizer: Function from the training documents to a tokenizer. The default
      makes tokens of bytes.
    part_of: Number of the part that a file belongs to, by its name; 0 if it has
      none. Every part needs training text.
    judge_fraction: Share of the held-out files that judge, 0 to below 1. It
      moves no file to or from training.

  Returns:
    A corpus whose files are joined in the order of their names. The tokenizer's
    end of a text is between two files.

  Raises:
    ValueError: If a part has no text.
  """
  paths = sorted(files, key=lambda path: (part_of.get(path, 0), path))
  held_out = [p for p in paths if is_held_out(p, validation_fraction)]
  # If training had a copy of a validation file under another name, the
  # validation loss would measure memory.
  held_out_contents = {files[p] for p in held_out}
  kept_paths = [
    p for p in paths if files[p] and files[p] not in held_out_contents
  ]
  kept = [files[p] for p in kept_paths]
  texts = [files[p] for p in held_out if files[p]]
  judging = [t for t in texts if content_is_held_out(t, judge_fraction)]
  held = [t for t in texts if not content_is_held_out(t, judge_fraction)]
  require(
    bool(judging) == bool(judge_fraction) and len(judging) < max(len(texts), 1),
    f"{name}: judge_fraction={judge_fraction} sets {len(judging)} of"
    f" {len(texts)} held-out files aside: more files are needed, or another"
    " fraction",
  )
  if not kept or not held:
    empty, change = ("validation", "raise") if kept else ("training", "lower")
    raise ValueError(
      f"{name} has no {empty} text: validation_fraction={validation_fraction}"
      f" puts {len(held_out)} of {len(files)} files in validation; more files"
      f" are needed, or {change} validation_fraction"
    )
  made = tokenizer(kept)
  tokenizers.warn_of_changes(made, held[:100])
  digest = digest_of(files)
  if made.digest:
    digest = digest_of({digest: made.digest.encode()})
  validation = tokenizers.join(made, held)
  parts = [
    tokenizers.join(made, [files[p] for p in group])
    for _, group in itertools.groupby(kept_paths, lambda p: part_of.get(p, 0))
  ]
  num_parts = len({part_of.get(p, 0) for p in paths})
  require(
    len(parts) == num_parts,
    f"{name} has training text in {len(parts)} of {num_parts} globs: more files"
    " are needed, or lower validation_fraction",
  )
  require(
    bool(len(validation)) and all(map(len, parts)),
    f"{name}: the tokenizer makes no token of a text: take another one",
  )
  num_bytes = sum(map(len, held)) + len(held) - 1
  return Corpus(
    name,
    np.concatenate(parts),
    validation,
    digest,
    made.vocab_size,
    len(files),
    num_bytes / len(validation),
    made,
    parts=tuple(map(len, parts)),
    judge=tokenizers.join(made, judging) if judging else None,
  )


def content_is_held_out(content: bytes, fraction: float) -> bool:
  """Whether a text is held out, by its content: copies do the same.

  Args:
    content: The text.
    fraction: Share of texts that is held out, 0 to 1.
  """
  return is_held_out(hashlib.sha256(content).hexdigest(), fraction)
