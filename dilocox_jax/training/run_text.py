"""Loads the data of a run, and cuts texts into batches.

`data` takes plain arguments and does not know the config, which is read here.
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
from dilocox_jax.data.feeds import HANDED_IN, Feed, num_predictions
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
from dilocox_jax.models.token_limits import token_limits
from dilocox_jax.token_ids import Vocabulary, check_token_ids
from dilocox_jax.training.parts import NO_PARTS, Parts
from dilocox_jax.trees import Tree, leaves_by_path, tree_digest


@dataclasses.dataclass(frozen=True)
class RunData:
  """What a run is trained and evaluated on.

  Attributes:
    name: Name of the source.
    digest: 16 hex digits that name the content.
    step_tokens: Tokens, or examples, of one replica's inner step.
    streams: Training batches of every replica.
    validation: Batches of every evaluation, leaves [N, B, ...].
    batch: Shapes and types of what a replica reads in one inner step, leaves
      [B, ...].
    text: The text, if it is one.
    judging: Batches that the last evaluation alone reads, if there are any.
    bytes_per_token: As in `Corpus`.
    end_of_text: Token at which attention begins anew; None without masks.
    says: How much it is, in a few words, if it is no text.
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
  says: str = ""

  @property
  def held_out_digest(self) -> str:
    """Names the batches of every evaluation."""
    return tree_digest(self.validation, "held out")


def run_data(config: RunConfig, parts: Parts = NO_PARTS) -> RunData:
  """Returns the data that are handed in, or those of the config's source.

  Args:
    config: Config of the run.
    parts: Parts that are handed in.

  Raises:
    ValueError: One line, if there are none or too few, or the model does not
      know their tokens.
  """
  if parts.data is not None and not isinstance(parts.data, Corpus):
    return _of_feed(config, parts, parts.data)
  text = corpus(config, parts)
  require(
    text.judge is not None or not config.data.judge_fraction,
    f"data.judge_fraction={config.data.judge_fraction} does not reach a text "
    "that is handed in: drop it",
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
    batch=_batch_of_text(config),
    text=text,
    judging=judging,
    bytes_per_token=text.bytes_per_token,
    end_of_text=_end_of_text(config, text, parts),
  )


def _batch_of_text(config: RunConfig) -> jax.ShapeDtypeStruct:
  sizes = config.data.batch_size, config.data.sequence_length + 1
  return jax.ShapeDtypeStruct(sizes, np.int32)


def _of_feed(config: RunConfig, parts: Parts, feed: Feed) -> RunData:
  require(
    not config.data.judge_fraction,
    "data.judge_fraction is of texts, but data that are none are handed in: "
    "drop it",
  )
  sizes = config.data.batch_size, config.evaluation.num_sequences
  validation = feed.held_out(*sizes)  # First: it may be the head of the data.
  found = feed.streams(config.mesh.num_replicas, sizes[0], config.seed)
  example = feed.example(sizes[0])
  if _reads_tokens(parts):
    _check_sequences(config, parts, example, "a training batch")
    shape = example.shape[0], example.shape[1] - 1
    vocabulary = _known_tokens(config, parts, shape)
    check_token_ids(feed.seen_at_once(), vocabulary, "tokens of training")
    for held in validation:
      first = jax.tree.map(lambda leaf: leaf[0], held)
      _check_sequences(config, parts, first, "a validation batch")
      check_token_ids(held, vocabulary, "tokens of validation")
    found = CheckedStreams(found, vocabulary)
  else:
    for held in validation:
      _check_alike(example, held)
  batch = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), example
  )
  _check_division(config, batch)
  return RunData(
    HANDED_IN,
    feed.digest(validation),
    num_predictions(jax.tree.map(lambda leaf: leaf[None], example)),
    found,
    validation,
    batch,
    end_of_text=_end_of_text(config, None),
    says=feed.says,
  )


def _check_sequences(
  config: RunConfig, parts: Parts, batch: Tree, what: str
) -> None:
  """Raises ValueError unless the run's model can read sequences of a batch.

  Args:
    config: Config of the run.
    parts: Parts that are handed in.
    batch: Batch, which must be token ids [B, L + 1].
    what: What the batch is, for messages.
  """
  check_token_batch(batch, what)
  if parts.model is not None:
    return
  length, longest = batch.shape[1] - 1, config.model.shape.num_positions
  require(
    not longest or length <= longest,
    f"{what} has rows of {length + 1} tokens, of which {length} are read, but "
    f"the model has {longest} learned positions: take shorter rows, or raise "
    "model.num_positions",
  )


def _check_alike(train: Tree, validation: Tree) -> None:
  """Raises ValueError if batches of evaluations have another form.

  Args:
    train: A training batch, leaves [B, ...].
    validation: Batches of evaluations, leaves [N, B, ...].
  """
  wanted, held = leaves_by_path(train), leaves_by_path(validation)
  for path in wanted | held:
    expected, found = "nothing", "nothing"
    if path in wanted:
      expected = _form(wanted[path][0])
    if path in held:
      found = _form(held[path][0, 0])
    require(
      expected == found,
      f"validation data have {found} at {path or 'their root'}, but training "
      f"data have {expected}: both need the same form",
    )


def _form(example: np.ndarray) -> str:
  """Says what an array of an example has, and how many axes."""
  kinds = {"b": "booleans", "i": "integers", "u": "integers"}
  kind = kinds.get(example.dtype.kind, "floats")
  axes = "axis" if example.ndim == 1 else "axes"
  return f"{kind} with {example.ndim} {axes} in an example"


def _check_division(config: RunConfig, batch: Tree) -> None:
  """Raises ValueError unless a batch can be divided as the config says.

  Args:
    config: Config of the run.
    batch: Shapes of a training batch, leaves [B, ...].
  """
  micro, shards = config.inner.accumulate_steps, config.mesh.num_data_shards
  for leaf in jax.tree.leaves(batch):
    size = leaf.shape[0]
    require(
      size % (micro * shards) == 0,
      f"batches of {size} cannot be divided by inner.accumulate_steps={micro} "
      f"times mesh.num_data_shards={shards}",
    )


def corpus(config: RunConfig, parts: Parts = NO_PARTS) -> Corpus:
  """Returns the text that is handed in, or that of the config's data source.

  Args:
    config: Config of the run.
    parts: Parts that are handed in.

  Raises:
    ValueError: If there is no text, or the model has too few tokens for it. The
      message is one line.
  """
  text = parts.data
  if not isinstance(text, Corpus):
    text = text_of(config.data, config.seed)
  size = config.model.shape.vocab_size
  require(
    parts.model is not None or text.vocab_size <= size,
    f"the text has {text.vocab_size} different tokens, but the model "
    f"{config.model.label} has only {size}: set "
    f"model.vocab_size={text.vocab_size}, or lower data.vocab_size",
  )
  _check_tokens(text)
  if parts.model is not None and _reads_tokens(parts):
    shape = config.data.batch_size, config.data.sequence_length
    known = _known_tokens(config, parts, shape)
    require(
      text.vocab_size <= known.size,
      f"the text {text.name!r} has {text.vocab_size} different tokens, but "
      f"{known.source} has only {known.size}: hand in a model with as many, or "
      "data= with fewer",
    )
  return text


def _reads_tokens(parts: Parts) -> bool:
  """Whether batches are tokens, and not what a loss that is handed in reads."""
  return parts.model is None or parts.model.logits is not None


def _known_tokens(
  config: RunConfig, parts: Parts, shape: tuple[int, int]
) -> Vocabulary:
  """Returns the token ids that the run's model knows.

  Args:
    config: Config of the run.
    parts: Parts that are handed in. A model among them has logits.
    shape: Sequences of a batch, and the tokens of each that a model reads.

  Raises:
    ValueError: If the model returns something else than logits.
  """
  model = parts.model
  if model is None:
    size = config.model.shape.vocab_size
    return Vocabulary(size, f"model.vocab_size={size}")
  assert model.logits is not None
  params = jax.eval_shape(model.init, jax.random.key(0))
  limits = token_limits(model.logits, params, shape)
  if limits.table is not None and limits.table < limits.logits:
    rows = limits.table
    return Vocabulary(rows, f"the model, whose embedding has {rows} rows,")
  width = limits.logits
  return Vocabulary(width, f"the model, which has {width} logits a token,")


def _check_tokens(text: Corpus) -> None:
  """Raises TokenError if a text has tokens that its vocabulary lacks."""
  vocabulary = Vocabulary(text.vocab_size, f"vocab_size={text.vocab_size}")
  for what in ("train", "validation", "judge"):
    tokens = getattr(text, what)
    if tokens is None:
      continue
    name = f"{what} tokens of {text.name!r}"
    # To read all of a mapped file would take minutes. Its batches are checked.
    head = tokens[:1] if isinstance(tokens, np.memmap) else tokens
    check_token_ids(head, vocabulary, name)


def text_of(data: DataConfig, seed: int) -> Corpus:
  """Returns the text of a data source with the tokens that the config names.

  Args:
    data: Section of a config.
    seed: Seed of the run; the source "synthetic" reads it.

  Raises:
    ValueError: If the source has no text. The message is one line.
  """
  given = {k: v for k, v in vars(data).items() if k in sources.SETTINGS}
  given["tokenizer"] = tokenizers.choose(
    data.tokenizer, data.vocab_size, data.end_of_text
  )
  return sources.load_corpus(data.source, **given, seed=seed)


def _end_of_text(
  config: RunConfig, text: Corpus | None, parts: Parts = NO_PARTS
) -> int | None:
  """Returns the token at which attention begins anew; None without masks.

  Args:
    config: Config of the run.
    text: Text of the run (`corpus`), if it has one.
    parts: Parts that are handed in.

  Raises:
    ValueError: If `data.document_masks` is set, and the text has no such token
      or the model is handed in.
  """
  if not config.data.document_masks:
    return None
  made = text.tokenizer if text else None
  if made is None or made.name == tokenizers.BYTES:
    raise ValueError(
      "data.document_masks needs a token that ends a document, which the text "
      "has not: set data.tokenizer to 'bpe' or a tokenizer.json"
    )
  require(
    parts.model is None,
    "data.document_masks does not reach a model that is handed in: drop it",
  )
  return made.end_of_text


def streams(config: RunConfig, text: Corpus) -> ReplicaStreams:
  """Returns the training batches of every replica.

  Args:
    config: Config of the run.
    text: Text of the run (`corpus`).

  Raises:
    ValueError: If there is too little text, or `data.mix` does not fit it.
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
  """Cuts held-out tokens into the batches that every evaluation uses.

  Args:
    config: Config of the run.
    tokens: Tokens of the text (`corpus`) that validate, or judge.

  Returns:
    Arrays of token ids [N, B, L + 1]: N batches of B sequences of L + 1 tokens.
    The last ones of a whole pass have fewer and shorter sequences.
  """
  return held_out_batches(
    tokens,
    batch_size=config.data.batch_size,
    sequence_length=config.data.sequence_length,
    max_sequences=config.evaluation.num_sequences,
  )
