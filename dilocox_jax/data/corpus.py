"""Splits a set of files into training text, validation text and judge text.

The hash of a file's path decides whether the file is held out for validation.
So a held-out file stays held out when other files are added.

The judge text is a share of the held-out files that only a run's last
evaluation reads. Settings are chosen by the loss on the validation text, so the
loss on the judge text is a better estimate for new text.
"""

import dataclasses
import hashlib
import itertools
import types
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Integer

from dilocox_jax.checks import require
from dilocox_jax.data import tokenizers
from dilocox_jax.data.tokenizers import MakeTokenizer, Tokenizer

# Default share of the files that is held out from training.
VALIDATION_FRACTION = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """The tokens of a training, a validation and a judge text.

  Only the last evaluation of a run reads the judge text.

  Attributes:
    name: Name of the source, such as "stdlib".
    train: Training tokens [train_tokens], of any integer dtype.
    validation: Validation tokens [validation_tokens], of any integer dtype.
    digest: 16 hexadecimal digits that identify the content.
    vocab_size: Size of the vocabulary; every token is below this number.
    num_files: Number of files, or of documents if a file may have several; 0 if
      the source has no files.
    bytes_per_token: Bytes of the validation text per token, to convert nats per
      token to bits per byte; None if the source has no text in bytes.
    tokenizer: The tokenizer that made the tokens; None if there was none.
    parts: Number of training tokens of each part of the text (the files of one
      glob), in order; () if the source has no files.
    judge: Tokens of the judge text; None if there is no judge text.
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
    """Returns one line with the sizes of the texts, without their tokens."""
    return (
      f"Corpus({self.name}, {self.train.size:,} training and "
      f"{self.validation.size:,} validation tokens below {self.vocab_size:,}, "
      f"digest {self.digest})"
    )


def digest_of(files: Mapping[str, bytes]) -> str:
  """Returns 16 hexadecimal digits that identify files (contents by path)."""
  whole = hashlib.sha256()
  for path, content in sorted(files.items()):
    # Every hash has the same length, so {"ab": b"c"} and {"a": b"bc"} differ.
    whole.update(hashlib.sha256(path.encode(errors="surrogateescape")).digest())
    whole.update(hashlib.sha256(content).digest())
  return whole.hexdigest()[:16]


def is_held_out(path: str, validation_fraction: float) -> bool:
  """Returns whether a file is held out from training.

  A file is held out if the hash of its path, read as a number from 0 to 1, is
  less than the fraction. Example: "a.txt" has 0.097 and "ast.py" has 0.707.
  With the fraction 0.1 only "a.txt" is held out; with 0.8 both are.

  Args:
    path: Path relative to the root of the corpus, with forward slashes.
    validation_fraction: Share of the files to hold out, from 0 to 1.
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
  """Splits files into training, validation and judge text, and makes tokens.

  Empty files are left out. Training also leaves out copies of held-out files.

  Args:
    name: Name of the source.
    files: Content of each file, or of each document, by its name.
    validation_fraction: Share of the files that is held out from training,
      above 0 and below 1.
    tokenizer: Function from the training documents to a tokenizer. The default
      makes a token of each byte.
    part_of: Index of the part of the text (the files of one glob) to which a
      file belongs, by the name of the file; 0 for files without an entry.
    judge_fraction: Share of the held-out files that become the judge text,
      which only a run's last evaluation reads, from 0 to below 1.

  Returns:
    A corpus whose files are joined part by part; within a part, in the order of
    their names. The tokenizer's `end_of_text` is between two files, but not
    between the parts of the training text.

  Raises:
    ValueError: If the training text of a part, the validation text, or a judge
      text that is asked for would be empty; if the tokenizer cannot be made; or
      if it cannot encode a file, or makes no token of a text.
  """
  paths = sorted(files, key=lambda path: (part_of.get(path, 0), path))
  held_out_paths = [
    path for path in paths if is_held_out(path, validation_fraction)
  ]
  # If training had a copy of a validation file under another name, the
  # validation loss would measure what the model remembers.
  held_out_contents = {files[path] for path in held_out_paths}
  train_paths = [
    path
    for path in paths
    if files[path] and files[path] not in held_out_contents
  ]
  train_texts = [files[path] for path in train_paths]
  held_out_texts = [files[path] for path in held_out_paths if files[path]]
  validation_texts, judge_texts = _without_judge(
    name, held_out_texts, judge_fraction
  )
  if not train_texts or not validation_texts:
    empty = "validation" if train_texts else "training"
    change = "raise" if train_texts else "lower"
    raise ValueError(
      f"{name} has no {empty} text: validation_fraction={validation_fraction}"
      f" puts {len(held_out_paths)} of {len(files)} files in validation; more"
      f" files are needed, or {change} validation_fraction"
    )
  built_tokenizer = tokenizer(train_texts)
  tokenizers.warn_of_changes(built_tokenizer, validation_texts[:100])
  digest = digest_of(files)
  if built_tokenizer.digest:
    digest = digest_of({digest: built_tokenizer.digest.encode()})
  validation = tokenizers.join(built_tokenizer, validation_texts)
  parts = [
    tokenizers.join(built_tokenizer, [files[path] for path in part_paths])
    for _, part_paths in itertools.groupby(
      train_paths, lambda path: part_of.get(path, 0)
    )
  ]
  num_parts = len({part_of.get(path, 0) for path in paths})
  require(
    len(parts) == num_parts,
    f"{name} has training text in {len(parts)} of {num_parts} globs: more files"
    " are needed, or lower validation_fraction",
  )
  require(
    len(validation) > 0 and all(len(part) > 0 for part in parts),
    f"{name}: the tokenizer makes no token of a text: take another one",
  )
  # Every end of a text between two files counts as one byte.
  num_bytes = sum(map(len, validation_texts)) + len(validation_texts) - 1
  judge = None
  if judge_texts:
    judge = tokenizers.join(built_tokenizer, judge_texts)
  return Corpus(
    name=name,
    train=np.concatenate(parts),
    validation=validation,
    digest=digest,
    vocab_size=built_tokenizer.vocab_size,
    num_files=len(files),
    bytes_per_token=num_bytes / len(validation),
    tokenizer=built_tokenizer,
    parts=tuple(map(len, parts)),
    judge=judge,
  )


def _without_judge(
  name: str, held_out_texts: Sequence[bytes], judge_fraction: float
) -> tuple[list[bytes], list[bytes]]:
  """Splits held-out texts into validation texts and judge texts.

  Raises ValueError if a judge text is asked for and there is none, or if the
  judge texts leave no validation text.
  """
  judge_texts = []
  validation_texts = []
  for text in held_out_texts:
    if content_is_held_out(text, judge_fraction):
      judge_texts.append(text)
    else:
      validation_texts.append(text)
  has_judge_as_asked = bool(judge_texts) == bool(judge_fraction)
  # True also if no text is held out at all, which the caller refuses.
  leaves_validation = len(judge_texts) < max(len(held_out_texts), 1)
  require(
    has_judge_as_asked and leaves_validation,
    f"{name}: judge_fraction={judge_fraction} sets {len(judge_texts)} of"
    f" {len(held_out_texts)} held-out files aside: more files are needed, or"
    " another fraction",
  )
  return validation_texts, judge_texts


def content_is_held_out(content: bytes, fraction: float) -> bool:
  """Returns whether a text belongs to a held-out fraction of texts.

  The hash of its content decides, so all copies of a text are held out or none.
  """
  return is_held_out(hashlib.sha256(content).hexdigest(), fraction)
