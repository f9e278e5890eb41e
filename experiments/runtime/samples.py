"""Lets the model of a run continue a text, and shows that in its report."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np

from dilocox_jax import report
from dilocox_jax.api.runs import Run, load
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.metrics.lines import write_atomically
from dilocox_jax.models.sampling import generate
from dilocox_jax.plan.choices import loaded
from dilocox_jax.training.run_text import corpus

_PROMPT_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Draw:
  """What is drawn, and how.

  Attributes:
    prompt: Text to continue; None: the first tokens of the validation text.
    num_tokens: Number of tokens to draw.
    temperature: Divides the logits; 0 takes the likeliest token.
    top_p: Share of the probability from which tokens are drawn, 0 to 1.
    seed: Seed of the draws.
  """

  prompt: str | None = None
  num_tokens: int = 200
  temperature: float = 0.8
  top_p: float = 0.95
  seed: int = 0


def add_sample(
  workdir: str | pathlib.Path, draw: Draw, text: Corpus | None = None
) -> str:
  """Continues a text with the model of a run, and adds it to the report.

  Args:
    workdir: The run directory.
    draw: What is drawn.
    text: The run's text; None reads it again.

  Returns:
    The prompt and what follows.

  Raises:
    ValueError: If the directory holds no run, its text has no tokenizer, its
      model cannot decode, or the prompt is empty.
    RefusedError: If there is no checkpoint.
  """
  run = load(workdir)
  written = _continued(run, draw, text or corpus(run.config))
  write_atomically(run.workdir / report.SAMPLE, written)
  report.write_report(run.workdir)
  return written


def _continued(run: Run, draw: Draw, text: Corpus) -> str:
  tokenizer = text.tokenizer
  if tokenizer is None or draw.prompt == "":
    why = "the prompt is empty" if tokenizer else "the text has no tokenizer"
    raise ValueError(f"{why}: there is nothing to continue")
  if draw.prompt is None:
    prompt = text.validation[:_PROMPT_TOKENS]
  else:
    (prompt,) = tokenizer.encode([draw.prompt.encode()])
  shape = run.config.model.shape
  continued = jax.jit(
    functools.partial(
      generate,
      loaded(type(shape).builder)(shape),
      num_tokens=draw.num_tokens,
      temperature=draw.temperature,
      top_p=draw.top_p,
    )
  )
  key = jax.random.key(draw.seed)
  tokens = continued(run.params, prompt[None].astype(np.int32), key=key)
  return tokenizer.decode(np.concatenate([prompt, np.asarray(tokens)[0]]))
