"""Examples that somebody hands in: trees of arrays, or sets of Hugging Face.

A text is cut into sequences (`streams`). Examples have random access too: they
are divided among the replicas in an order drawn anew for every epoch, as
sequences are. What gives whole batches is in `batch_feeds`.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.streams import ReplicaStreams
from dilocox_jax.trees import Tree

HANDED_IN = "handed in"
_DIGESTED = 1000  # Training examples that a digest reads.


@runtime_checkable
class Streams(Protocol):
  """Endless streams of batches, one for each replica."""

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """Reads the next batches, leaves [replicas, num_steps, ...]."""
    ...

  def get_state(self) -> dict[str, Any]:
    """Returns the position, for JSON."""
    ...

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on at a position; raises ValueError if it is of other streams."""
    ...


@runtime_checkable
class Feed(Protocol):
  """Data of a run that is no text."""

  @property
  def says(self) -> str:
    """What it is, in a few words."""
    ...

  def example(self, batch_size: int = 1) -> Tree:
    """Returns a batch, leaves [B, ...]; B may be the feed's own."""
    ...

  def streams(self, num_replicas: int, batch_size: int, seed: int) -> Streams:
    """Returns the training batches of every replica."""
    ...

  def held_out(self, batch_size: int, most: int) -> list[Tree]:
    """Returns batches for every evaluation, leaves [N, B, ...]."""
    ...

  def digest(self, held_out: Iterable[Tree]) -> str:
    """Returns 16 hex digits that name the content."""
    ...


class ExampleRows:
  """Examples with random access: arrays, or a data set of Hugging Face.

  Raises:
    TypeError: If it is neither.
    ValueError: If arrays have different numbers of examples.
  """

  def __init__(self, examples: Any):
    self._set, self._arrays = None, None
    if hasattr(examples, "column_names"):
      self._set, self.count = examples.with_format("numpy"), len(examples)
      return
    self._arrays = jax.tree.map(numbers, examples)
    leaves = jax.tree.leaves(self._arrays)
    counts = sorted({len(leaf) if leaf.ndim else 0 for leaf in leaves})
    if not leaves or not counts[0]:
      raise TypeError("there are no examples")
    require(
      len(counts) == 1,
      f"arrays of data have {' and '.join(map(str, counts))} rows: give each "
      "the same number of examples",
    )
    self.count = counts[0]

  @property
  def text(self) -> np.ndarray | None:
    """The token ids, if this is one array of them."""
    found = self._arrays
    if isinstance(found, np.ndarray) and found.ndim == 1:
      return found if found.dtype.kind in "iu" else None
    return None

  def take(self, ids: np.ndarray) -> Tree:
    """Returns examples, leaves [*ids.shape, ...].

    Args:
      ids: Numbers of examples, of any shape.
    """
    if self._set is None:
      return jax.tree.map(lambda leaf: narrow(leaf[ids]), self._arrays)
    found = self._set[ids.reshape(-1).tolist()]
    found = {name: narrow(numbers(values)) for name, values in found.items()}
    return jax.tree.map(lambda x: x.reshape(*ids.shape, *x.shape[1:]), found)

  def spaced(self, number: int) -> np.ndarray:
    """Returns the ids of so many examples, evenly spaced, or of all."""
    number = min(number, self.count)
    return np.arange(number) * self.count // number

  def held_out(self, batch_size: int, most: int) -> list[Tree]:
    """Returns evenly spaced examples in batches; all of them for `most` = 0."""
    ids = self.spaced(most or self.count)
    whole = len(ids) // batch_size * batch_size
    parts = ids[:whole].reshape(-1, batch_size), ids[None, whole:]
    return [self.take(part) for part in parts if part.size]


@dataclasses.dataclass(frozen=True)
class Examples:
  """Examples to train and to evaluate on, a `Feed`."""

  train: ExampleRows
  validation: ExampleRows

  @property
  def says(self) -> str:
    """What it is, in a few words."""
    return f"{self.train.count:,} examples"

  def example(self, batch_size: int = 1) -> Tree:
    """Returns a batch of examples."""
    return self.train.take(np.arange(batch_size) % self.train.count)

  def streams(self, num_replicas: int, batch_size: int, seed: int) -> Streams:
    """Divides the examples among replicas, in an order drawn each epoch."""
    count = self.train.count
    require(
      count >= num_replicas * batch_size,
      f"{count} examples are less than a batch of {batch_size} for each of "
      f"{num_replicas} replicas: lower data.batch_size",
    )
    order = ReplicaStreams(
      np.arange(count),
      num_replicas=num_replicas,
      batch_size=batch_size,
      sequence_length=0,  # The number of an example is a sequence of one.
      seed=seed,
    )
    return _Ordered(order, self.train)

  def held_out(self, batch_size: int, most: int) -> list[Tree]:
    """Returns evenly spaced examples; all of them for `most` = 0."""
    return self.validation.held_out(batch_size, most)

  def digest(self, held_out: Iterable[Tree]) -> str:
    """Names some training examples, their number, and what is held out."""
    seen = self.train.take(self.train.spaced(_DIGESTED))
    return tree_digest([seen, *held_out], str(self.train.count))


class _Ordered:
  """Streams of examples, in the order of a stream of their numbers."""

  def __init__(self, order: ReplicaStreams, rows: ExampleRows):
    self._order, self._rows = order, rows
    self.get_state, self.set_state = order.get_state, order.set_state

  def take(self, num_steps: int, replicas: Sequence[int] | None = None) -> Tree:
    """As in `Streams`."""
    return self._rows.take(self._order.take(num_steps, replicas)[..., 0])


def text_or_examples(
  train: ExampleRows, validation: ExampleRows
) -> Corpus | Feed:
  """Returns two arrays of tokens as a text, and anything else as examples."""
  texts = [rows.text for rows in (train, validation) if rows.text is not None]
  if len(texts) < 2:
    return Examples(train, validation)
  size = 1 + max(int(text.max()) for text in texts)
  tokens, held = texts
  return Corpus(HANDED_IN, tokens, held, tree_digest(texts, "text"), size, 0)


def num_predictions(batches: Tree) -> int:
  """Returns how many predictions a loss of batches is the mean of.

  Args:
    batches: Token ids [N, B, L + 1], of which the last L are predicted, or any
      other tree of arrays [N, B, ...], of N * B examples.
  """
  first, *others = jax.tree.leaves(batches)
  if not others and first.ndim == 3 and first.dtype.kind in "iu":
    return first[..., 1:].size
  return first.shape[0] * first.shape[1]


def numbers(leaf: Any) -> np.ndarray:
  """Returns an array; raises TypeError unless it has numbers or booleans."""
  found = np.asarray(leaf)
  if found.dtype.kind not in "iufb" and found.dtype.name != "bfloat16":
    raise TypeError(f"it has {found.dtype}, but only numbers can be trained on")
  return found


def narrow(leaf: np.ndarray) -> np.ndarray:
  """Returns an array in the type that JAX would give it."""
  return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)


def tree_digest(trees: Iterable[Tree], name: str) -> str:
  """Returns 16 hex digits that name trees of arrays.

  Args:
    trees: The trees, in order.
    name: What else the digest depends on.
  """
  whole = hashlib.sha256(name.encode())
  for leaf in jax.tree.leaves(list(trees)):
    whole.update(f"{leaf.dtype}{leaf.shape}".encode())
    whole.update(np.ascontiguousarray(leaf).tobytes())
  return whole.hexdigest()[:16]
