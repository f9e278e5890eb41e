"""Loads and checks the data of a run, and cuts texts into batches.

The package `data` takes plain arguments and does not know the config. This
module reads the config and calls that package.
"""

import dataclasses
from collections.abc import Iterable

import jax
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import DataConfig
from dilocox_jax.data import sources, tokenizers
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.feeds import PASSED_IN, Feed, num_predictions
from dilocox_jax.data.streams import (
  ReplicaStreams,
  Streams,
  held_out_batches,
  mix_of,
)
from dilocox_jax.data.token_checks import (
  CheckedBatches,
  CheckedStreams,
  check_token_batch,
)
from dilocox_jax.models.random_loss import KeyedBatch
from dilocox_jax.models.token_limits import token_limits
from dilocox_jax.token_ids import Vocabulary, check_token_ids
from dilocox_jax.training.keyed_streams import KeyedStreams
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.trees import Tree, leaves_by_path, tree_digest


@dataclasses.dataclass(frozen=True)
class RunData:
  """Data on which a run is trained and evaluated.

  Attributes:
    name: Name of the source.
    digest: Digest of the content, 16 hex digits.
    step_tokens: Number of predicted tokens, or of examples, in one replica's
      inner step.
    streams: Training batches of every replica.
    validation: Batches of every evaluation: trees with leaves [N, B, ...] of N
      batches with B examples each.
    batch: Shapes and types of one replica's batch of an inner step, leaves
      [B, ...].
    text: The text; None if the data are not a text.
    judging: Batches for the last evaluation only, in the form of `validation`;
      None: there are none.
    bytes_per_token: Mean number of bytes of text in a token of the validation
      text; None if it is not known.
    end_of_text: Token that ends a document, after which attention starts anew;
      None: attention reads across documents.
    description: Description of data that are not a text, for the log, e.g.
      "1,000 rows of 129 tokens"; "" for a text.
  """

  name: str
  digest: str
  step_tokens: int
  streams: Streams
  validation: Iterable[Tree]
  batch: Tree
  text: Corpus | None = None
  judging: Iterable[Tree] | None = None
  bytes_per_token: float | None = None
  end_of_text: int | None = None
  description: str = ""

  @property
  def held_out_digest(self) -> str:
    """Digest of `validation`, the batches of every evaluation."""
    return tree_digest(self.validation, "held out")


def run_data(config: RunConfig, overrides: Overrides = NO_OVERRIDES) -> RunData:
  """Loads the data of a run: the user's data, or the text of the config.

  Raises:
    ValueError: In one of these cases:

      - The text cannot be loaded.
      - There is too little data.
      - A token is not in the vocabulary of the text or of the model.
      - The config does not fit the data or the model that the caller passes.
  """
  data = _run_data(config, overrides)
  if overrides.model is None or not overrides.model.draws_random:
    return data
  # The model's loss draws random numbers, so each example gets a random key.
  batch_size = jax.tree.leaves(data.batch)[0].shape[0]
  keys = jax.ShapeDtypeStruct((batch_size, 2), np.uint32)
  return dataclasses.replace(
    data,
    streams=KeyedStreams(data.streams, config.mesh.num_replicas, config.seed),
    batch=KeyedBatch(data.batch, keys),
  )


def _run_data(config: RunConfig, overrides: Overrides) -> RunData:
  """Returns the data of a run, without random keys for the model's loss."""
  if overrides.data is not None and not isinstance(overrides.data, Corpus):
    return _feed_data(config, overrides, overrides.data)
  text = corpus(config, overrides)
  require(
    text.judge is not None or not config.data.judge_fraction,
    f"data.judge_fraction={config.data.judge_fraction} divides a text that the "
    "run loads, but a text without a judge part is passed in: drop it",
  )
  vocabulary = Vocabulary(text.vocab_size, f"vocab_size={text.vocab_size}")
  judging = None
  if text.judge is not None:
    judging = CheckedBatches(held_out(config, text.judge), vocabulary)
  return RunData(
    name=text.name,
    digest=text.digest,
    step_tokens=config.tokens_per_replica_step,
    streams=CheckedStreams(streams(config, text), vocabulary),
    validation=CheckedBatches(held_out(config, text.validation), vocabulary),
    batch=_text_batch(config),
    text=text,
    judging=judging,
    bytes_per_token=text.bytes_per_token,
    end_of_text=_end_of_text(config, text, overrides),
  )


def _text_batch(config: RunConfig) -> jax.ShapeDtypeStruct:
  """Returns shape [B, L + 1] and type of a replica's batch of token ids."""
  shape = (config.data.batch_size, config.data.sequence_length + 1)
  return jax.ShapeDtypeStruct(shape, np.int32)


def _feed_data(config: RunConfig, overrides: Overrides, feed: Feed) -> RunData:
  """Returns the data of a run if the user supplies data that are not a text.

  Raises ValueError if the model or the config does not fit the data.
  """
  require(
    not config.data.judge_fraction,
    f"data.judge_fraction={config.data.judge_fraction} divides a text, but "
    "data of another kind are passed in: drop it",
  )
  batch_size = config.data.batch_size
  # Validation comes before training: it may be the first part of the data.
  validation = feed.held_out(batch_size, config.evaluation.num_sequences)
  training = feed.streams(config.mesh.num_replicas, batch_size, config.seed)
  example = feed.example(batch_size)
  if _reads_tokens(overrides):
    _check_sequences(config, overrides, example, "a training batch")
    sequences_shape = (example.shape[0], example.shape[1] - 1)
    vocabulary = _known_tokens(config, overrides, sequences_shape)
    # `CheckedStreams` checks the other training tokens when they are read.
    check_token_ids(feed.seen_at_once(), vocabulary, "tokens of training")
    for batches in validation:
      first_batch = jax.tree.map(lambda leaf: leaf[0], batches)
      _check_sequences(config, overrides, first_batch, "a validation batch")
      check_token_ids(batches, vocabulary, "tokens of validation")
    training = CheckedStreams(training, vocabulary)
  else:
    for batches in validation:
      _check_same_form(example, batches)
  batch = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), example
  )
  _check_division(config, batch)
  # `num_predictions` reads several batches, so the example gets an axis [N].
  one_batch = jax.tree.map(lambda leaf: leaf[None], example)
  return RunData(
    name=PASSED_IN,
    digest=feed.digest(validation),
    step_tokens=num_predictions(one_batch),
    streams=training,
    validation=validation,
    batch=batch,
    end_of_text=_end_of_text(config, None),
    description=feed.description,
  )


def _check_sequences(
  config: RunConfig, overrides: Overrides, batch: Tree, name: str
) -> None:
  """Raises ValueError unless the run's model can read the rows of a batch.

  The length of the rows is checked only for a model of the config.
  """
  check_token_batch(batch, name)
  if overrides.model is not None:
    return
  length = batch.shape[1] - 1
  num_positions = config.model.shape.num_positions
  require(
    not num_positions or length <= num_positions,
    f"{name} has rows of {length + 1} tokens, of which {length} are read, but "
    f"the model has {num_positions} learned positions: take shorter rows, or "
    "raise model.num_positions",
  )


def _check_same_form(train: Tree, validation: Tree) -> None:
  """Raises ValueError if validation and training batches differ in form.

  The form of an array is its kind (booleans, integers or floats) and its number
  of axes.
  """
  # The first example is compared: leaves [B, ...] of one training batch, and
  # leaves [N, B, ...] of several validation batches.
  train_leaves = leaves_by_path(train)
  validation_leaves = leaves_by_path(validation)
  for path in train_leaves | validation_leaves:
    train_form = "nothing"
    if path in train_leaves:
      train_form = _form(train_leaves[path][0])
    validation_form = "nothing"
    if path in validation_leaves:
      validation_form = _form(validation_leaves[path][0, 0])
    require(
      train_form == validation_form,
      f"validation data have {validation_form} at {path or 'their root'}, but "
      f"training data have {train_form}: both need the same form",
    )


def _form(example: np.ndarray) -> str:
  """Describes an example, e.g. "integers with 1 axis in an example"."""
  kinds = {"b": "booleans", "i": "integers", "u": "integers"}
  kind = kinds.get(example.dtype.kind, "floats")
  axes = "axis" if example.ndim == 1 else "axes"
  return f"{kind} with {example.ndim} {axes} in an example"


def _check_division(config: RunConfig, batch: Tree) -> None:
  """Raises ValueError unless data shards and micro-batches divide a batch.

  Data shards are the devices of a replica that read different rows of a batch.
  """
  accumulate_steps = config.inner.accumulate_steps
  num_data_shards = config.mesh.num_data_shards
  for leaf in jax.tree.leaves(batch):
    batch_size = leaf.shape[0]
    require(
      batch_size % (accumulate_steps * num_data_shards) == 0,
      f"batches of {batch_size} cannot be divided by "
      f"inner.accumulate_steps={accumulate_steps} times "
      f"mesh.num_data_shards={num_data_shards}",
    )


def corpus(config: RunConfig, overrides: Overrides = NO_OVERRIDES) -> Corpus:
  """Returns `overrides.data` if it is a `Corpus`, or loads the config's text.

  Raises:
    ValueError: If the text cannot be loaded, or if the vocabulary of the model
      is smaller than the vocabulary of the text.
    TokenError: If a token of the text is not in the text's vocabulary. Of
      tokens that are mapped from a file, only the first one is checked.
  """
  text = overrides.data
  if not isinstance(text, Corpus):
    text = text_of(config.data, config.seed)
  model_vocab_size = config.model.shape.vocab_size
  require(
    overrides.model is not None or text.vocab_size <= model_vocab_size,
    f"the text has {text.vocab_size} different tokens, but the model "
    f"{config.model.label} has only {model_vocab_size}: set "
    f"model.vocab_size={text.vocab_size}, or lower data.vocab_size",
  )
  _check_tokens(text)
  if overrides.model is not None and _reads_tokens(overrides):
    sequences_shape = (config.data.batch_size, config.data.sequence_length)
    vocabulary = _known_tokens(config, overrides, sequences_shape)
    require(
      text.vocab_size <= vocabulary.size,
      f"the text {text.name!r} has {text.vocab_size} different tokens, but "
      f"{vocabulary.source} has only {vocabulary.size}: pass a model with "
      "as many, or data= with fewer",
    )
  return text


def _reads_tokens(overrides: Overrides) -> bool:
  """Returns whether the batches of a run must be tokens.

  They must, unless the model is supplied and has no logits.
  """
  return overrides.model is None or overrides.model.logits is not None


def _known_tokens(
  config: RunConfig, overrides: Overrides, sequences_shape: tuple[int, int]
) -> Vocabulary:
  """Returns the token ids that the run's model knows: 0 to the largest one.

  The model of a config knows `model.vocab_size` tokens. A supplied model must
  have logits. It knows as many tokens as it has logits. If the table in which
  it looks up tokens has fewer rows, it knows only as many tokens as rows.
  """
  model = overrides.model
  if model is None:
    size = config.model.shape.vocab_size
    return Vocabulary(size, f"model.vocab_size={size}")
  assert model.logits is not None
  params = jax.eval_shape(model.init, jax.random.key(0))
  limits = token_limits(model.logits, params, sequences_shape)
  num_logits = limits.num_logits
  rows = limits.table_rows
  if rows is not None and rows < num_logits:
    return Vocabulary(rows, f"the model, whose embedding has {rows} rows,")
  return Vocabulary(
    num_logits, f"the model, which has {num_logits} logits a token,"
  )


def _check_tokens(text: Corpus) -> None:
  """Raises TokenError if a text has tokens that are not in its vocabulary.

  Of tokens that are mapped from a file, only the first one is checked.
  """
  vocabulary = Vocabulary(text.vocab_size, f"vocab_size={text.vocab_size}")
  for split in ("train", "validation", "judge"):
    tokens = getattr(text, split)
    if tokens is None:
      continue
    if isinstance(tokens, np.memmap):
      # The other tokens are checked when batches are read.
      tokens = tokens[:1]
    check_token_ids(tokens, vocabulary, f"{split} tokens of {text.name!r}")


def text_of(data: DataConfig, seed: int) -> Corpus:
  """Loads the text of a data source, as tokens of the config's tokenizer.

  Args:
    data: Section `data` of a config.
    seed: Seed of the run. Of the built-in sources only "synthetic" uses it.

  Raises:
    ValueError: If the text cannot be loaded.
  """
  # The other fields of the section say how the loaded text is read.
  settings = {
    name: value
    for name, value in vars(data).items()
    if name in sources.SETTINGS
  }
  settings["tokenizer"] = tokenizers.choose(
    data.tokenizer, data.vocab_size, data.end_of_text
  )
  return sources.load_corpus(data.source, **settings, seed=seed)


def _end_of_text(
  config: RunConfig, text: Corpus | None, overrides: Overrides = NO_OVERRIDES
) -> int | None:
  """Returns the token that ends a document; None without document masks.

  Raises ValueError if document masks are to be used with a text that has no
  such token of its own, or with a model that the user supplies.
  """
  if not config.data.document_masks:
    return None
  tokenizer = text.tokenizer if text else None
  if tokenizer is None or tokenizer.name == tokenizers.BYTES:
    raise ValueError(
      "data.document_masks needs a token that ends a document, which the text "
      "has not: set data.tokenizer to 'bpe' or a tokenizer.json"
    )
  require(
    overrides.model is None,
    "data.document_masks does not reach a model that is passed in: drop it",
  )
  return tokenizer.end_of_text


def streams(config: RunConfig, text: Corpus) -> ReplicaStreams:
  """Returns the training batches of every replica.

  Raises:
    ValueError: If there is too little text, or if `data.mix` does not fit the
      parts of the text.
  """
  num_replicas = config.mesh.num_replicas
  return ReplicaStreams(
    text.train,
    num_replicas=num_replicas,
    batch_size=config.data.batch_size,
    sequence_length=config.data.sequence_length,
    seed=config.seed,
    parts=text.parts,
    mix=mix_of(config.data.mix, num_replicas, len(text.parts)),
  )


def held_out(config: RunConfig, tokens: np.ndarray) -> Iterable[np.ndarray]:
  """Cuts validation or judge tokens into the batches of an evaluation.

  Returns:
    Arrays of token ids [N, B, L + 1]: N batches of B sequences of L + 1 tokens.
    They have at most `evaluation.num_sequences` sequences together. If this
    field is 0, they have all tokens, and the last arrays have fewer or shorter
    sequences.

  Raises:
    ValueError: If there are too few tokens for one batch, or if
      `evaluation.num_sequences` is less than a batch. If the field is 0, two
      tokens are enough.
  """
  return held_out_batches(
    tokens,
    batch_size=config.data.batch_size,
    sequence_length=config.data.sequence_length,
    max_sequences=config.evaluation.num_sequences,
  )
