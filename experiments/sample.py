"""Lets the model of a run continue a text.

  python -m experiments.sample --run=runs/x --prompt='def main' --num_tokens=200

Prints the prompt and what follows. With --temperature=0 the likeliest token is
taken every time. The run's report shows the last sample.
"""

import functools
import pathlib
from typing import TYPE_CHECKING

from absl import flags

from dilocox_jax.checks import of_type, printable, require, within_limits
from experiments.runtime import command_line, own_parts

if TYPE_CHECKING:
  from dilocox_jax.api.runs import Run
  from dilocox_jax.data.corpus import Corpus

_PROMPT_TOKENS = 64
_LARGEST_SEED = 2**32 - 1  # As in a config.


def define_flags() -> None:
  """Defines the flags of this binary."""
  flags.DEFINE_string("run", None, "Directory of the run.", required=True)
  own_parts.define_parts()
  text = "Text to continue; by default the first tokens of the validation text."
  flags.DEFINE_string("prompt", None, text)
  text = "Number of tokens to draw."
  flags.DEFINE_integer("num_tokens", 200, text, lower_bound=1)
  text = "Divides the logits; 0 takes the likeliest token."
  flags.DEFINE_float("temperature", 0.8, text, lower_bound=0.0)
  text = "Share of the probability from which tokens are drawn."
  flags.DEFINE_float("top_p", 0.95, text, lower_bound=1e-6, upper_bound=1.0)
  limits = {"lower_bound": 0, "upper_bound": _LARGEST_SEED}
  flags.DEFINE_integer("seed", 0, "Seed of the draws.", **limits)


def main(values: flags.FlagValues) -> None:
  """Prints a sample and adds it to the run's report."""
  given = values.temperature, values.top_p, values.seed
  with command_line.usage_errors(kinds=(ValueError, RuntimeError)):
    text = add_sample(values.run, values.num_tokens, values.prompt, *given)
  for line in text.splitlines():
    # A model may write sequences with which a terminal moves its cursor.
    print("\t".join(map(printable, line.split("\t"))))


def add_sample(
  workdir: str | pathlib.Path,
  num_tokens: int,
  prompt: str | None = None,
  temperature: float = 0.8,
  top_p: float = 0.95,
  seed: int = 0,
  text: "Corpus | None" = None,
) -> str:
  """Continues a text with the model of a run, and adds it to the report.

  Args:
    workdir: The run directory.
    num_tokens: Number of tokens to draw.
    prompt: Text to continue; None: the first tokens of the validation text.
    temperature: Divides the logits; 0 takes the likeliest token.
    top_p: Share of the probability from which tokens are drawn, 0 to 1.
    seed: Seed of the draws.
    text: The `Corpus` of the run; None reads it again.

  Returns:
    The prompt and what follows.

  Raises:
    ValueError: If the directory holds no run, its text has no tokenizer or is
      another one now, its model cannot decode or gives no numbers, the prompt
      is empty or has tokens that the model lacks, or a number is out of range.
    RefusedError: If there is no checkpoint.
  """
  # These load JAX, which takes seconds.
  import jax
  import numpy as np

  from dilocox_jax import report
  from dilocox_jax.api.runs import load
  from dilocox_jax.data.token_checks import Vocabulary, check_token_ids
  from dilocox_jax.metrics.lines import write_atomically
  from dilocox_jax.models.sampling import NO_TOKEN, generate

  within_limits(
    "seed", of_type("seed", seed, int), at_least=0, at_most=_LARGEST_SEED
  )
  if prompt is not None:
    of_type("prompt", prompt, str)
  run = load(workdir)
  is_read_again = text is None
  text = _text_of(run) if text is None else text
  tokenizer = text.tokenizer
  if tokenizer is None:
    raise ValueError("the text has no tokenizer: there is nothing to continue")
  # Bytes are the same tokens whatever the text is.
  follows_from_text = bool(tokenizer.digest) or not is_read_again
  require(
    not follows_from_text or text.digest == run.metrics.record["corpus_digest"],
    "the text or its tokenizer is not that of the run, whose tokens may mean "
    "something else: restore the files that it was trained on",
  )
  tokens = text.validation[:_PROMPT_TOKENS]
  if prompt is not None:
    (tokens,) = tokenizer.encode([prompt.encode()])
  require(len(tokens) > 0, "the prompt is empty: there is nothing to continue")
  size = run.config.model.shape.vocab_size
  vocabulary = Vocabulary(size, f"model.vocab_size={size}")
  check_token_ids(tokens, vocabulary, "tokens of the prompt")
  how = {"dtype": np.dtype("float32"), "attention": "plain", "remat": "none"}
  model = run.config.model_builder(run.config.model.shape, unroll=1, **how)
  drawn = {"temperature": temperature, "top_p": top_p}
  draw = functools.partial(generate, model, num_tokens=num_tokens, **drawn)
  found = jax.jit(draw)(
    run.model, tokens[None].astype(np.int32), key=jax.random.key(seed)
  )
  drawn_tokens = np.asarray(found)[0]
  require(
    NO_TOKEN not in drawn_tokens,
    "the logits of the model are no numbers: its parameters have diverged",
  )
  written = tokenizer.decode(np.concatenate([tokens, drawn_tokens]))
  write_atomically(run.workdir / report.SAMPLE, written)
  report.write_report(run.workdir)
  return written


def _text_of(run: "Run") -> "Corpus":
  """Reads the text of a run again.

  Raises:
    ValueError: If it was handed in, so that nobody can.
  """
  from dilocox_jax.training.run_text import corpus

  require(
    "data" not in run.metrics.record.get("handed_in", ()),
    "the data of this run were handed in, so the text has no tokenizer here: "
    "hand it in again (text=), or train on a text that the config names",
  )
  return corpus(run.config)


if __name__ == "__main__":
  command_line.main(main, define_flags)
