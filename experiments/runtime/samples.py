"""Lets the model of a run continue a text, for the report of the run."""

import functools
import pathlib
from typing import TYPE_CHECKING

from dilocox_jax.checks import of_type, printable, require, within_limits

if TYPE_CHECKING:
  import numpy as np

  from dilocox_jax.api.runs import Run
  from dilocox_jax.data.corpus import Corpus


_PROMPT_TOKENS = 64  # Tokens that are continued if no prompt is given.
LARGEST_SEED = 2**32 - 1  # As in a config.
# Most tokens that the programs draw: positions are numbers of 32 bits.
MOST_TOKENS = 10**9


def add_sample(
  workdir: str | pathlib.Path,
  num_tokens: int,
  prompt: str | None = None,
  temperature: float = 0.8,
  top_p: float = 0.95,
  seed: int = 0,
  text: "Corpus | None" = None,
) -> str:
  """Continues a text with the model of a run, for the report of the run.

  The result is written to the run directory, in place of an earlier sample.
  Then the report of the run is written again, with the new sample.

  Args:
    workdir: The run directory.
    num_tokens: Number of tokens to draw, 0 or more.
    prompt: Text to continue; None: the first 64 tokens of the validation text.
    temperature: Divisor of the logits; 0 takes the likeliest token.
    top_p: Nucleus sampling: only the likeliest tokens with this total
      probability are drawn, 0 to 1.
    seed: Seed of the draws, 0 to 2**32 - 1.
    text: The `Corpus` on which the run was trained. None: the text that the
      run's config names is read. A run whose data were passed in needs `text`.

  Returns:
    The prompt and its continuation.

  Raises:
    ValueError: If the run, its text or an argument does not allow a sample. The
      message says why.
    RefusedError: If there is no checkpoint, or if `train` got an object other
      than the text, such as a model.
    RecordError: If the report cannot be written.
  """
  # These load JAX, which takes seconds.
  import numpy as np

  from dilocox_jax import report
  from dilocox_jax.api.runs import load
  from dilocox_jax.metrics.lines import write_atomically

  of_type("seed", seed, int)
  within_limits("seed", seed, at_least=0, at_most=LARGEST_SEED)
  if prompt is not None:
    of_type("prompt", prompt, str)
  run = load(workdir)
  is_passed = text is not None
  text = _text_of(run) if text is None else text
  tokenizer = text.tokenizer
  if tokenizer is None:
    raise ValueError("the text has no tokenizer: there is nothing to continue")
  # Tokens that are bytes (a tokenizer without a digest) mean the same in every
  # text. So a text of bytes that is read again may have changed since the run.
  must_be_unchanged = bool(tokenizer.digest) or is_passed
  require(
    not must_be_unchanged or text.digest == run.metrics.record["corpus_digest"],
    "the text or its tokenizer is not that of the run, whose tokens may mean "
    "something else: restore the files that it was trained on",
  )
  prompt_tokens = text.validation[:_PROMPT_TOKENS]
  if prompt is not None:
    (prompt_tokens,) = tokenizer.encode([prompt.encode()])
  drawn_tokens = _drawn_tokens(
    run,
    prompt_tokens,
    num_tokens=num_tokens,
    temperature=temperature,
    top_p=top_p,
    seed=seed,
  )
  sample = tokenizer.decode(np.concatenate([prompt_tokens, drawn_tokens]))
  write_atomically(run.workdir / report.SAMPLE, sample)
  report.write_report(run.workdir)
  return sample


def print_sample(sample: str) -> None:
  """Prints a sample, with escapes for characters that act on the terminal.

  Tabs and line ends are printed as they are.
  """
  for line in sample.splitlines():
    print("\t".join(map(printable, line.split("\t"))))


def _drawn_tokens(
  run: "Run",
  prompt_tokens: "np.ndarray",
  *,
  num_tokens: int,
  temperature: float,
  top_p: float,
  seed: int,
) -> "np.ndarray":
  """Draws `num_tokens` tokens that follow the tokens of a prompt [L].

  Other arguments, and ValueErrors, are as in `add_sample`.
  """
  import jax
  import numpy as np

  from dilocox_jax.models.sampling import NO_TOKEN, generate
  from dilocox_jax.token_ids import Vocabulary, check_token_ids

  require(
    len(prompt_tokens) > 0,
    "the prompt is empty: there is nothing to continue",
  )
  shape = run.config.model.shape
  vocabulary = Vocabulary(
    shape.vocab_size, f"model.vocab_size={shape.vocab_size}"
  )
  check_token_ids(prompt_tokens, vocabulary, "tokens of the prompt")
  model = run.config.model_builder(
    shape,
    unroll=1,
    dtype=np.dtype("float32"),
    attention="plain",
    remat="none",
  )
  draw = functools.partial(
    generate,
    model,
    num_tokens=num_tokens,
    temperature=temperature,
    top_p=top_p,
  )
  batch = prompt_tokens[None].astype(np.int32)
  drawn_batch = jax.jit(draw)(run.model, batch, key=jax.random.key(seed))
  drawn_tokens = np.asarray(drawn_batch)[0]
  require(
    NO_TOKEN not in drawn_tokens,
    "the logits of the model are no numbers: its parameters have diverged",
  )
  return drawn_tokens


def _text_of(run: "Run") -> "Corpus":
  """Reads the text that the config of a run names.

  Raises ValueError if the run was trained on data that were passed in.
  """
  from dilocox_jax.training.run_text import corpus

  require(
    "data" not in run.metrics.record.get("overrides", ()),
    "the data of this run were passed in, so the text has no tokenizer here: "
    "hand it in again (text=), or train on a text that the config names",
  )
  return corpus(run.config)
