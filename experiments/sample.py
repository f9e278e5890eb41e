"""Lets the model of a run continue a text.

  python -m experiments.sample --run=runs/x --prompt='def main' --num_tokens=200

Prints the prompt and what follows. With --temperature=0 the likeliest token is
taken every time. The run's report shows the last sample.
"""

from absl import flags

from experiments.runtime import command_line


def define_flags() -> None:
  """Defines the flags of this binary."""
  flags.DEFINE_string("run", None, "Directory of the run.", required=True)
  flags.DEFINE_string("prompt", "\n", "Text to continue.")
  text = "Number of tokens to draw."
  flags.DEFINE_integer("num_tokens", 200, text, lower_bound=1)
  text = "Divides the logits; 0 takes the likeliest token."
  flags.DEFINE_float("temperature", 0.8, text, lower_bound=0.0)
  text = "Share of the probability from which tokens are drawn."
  flags.DEFINE_float("top_p", 0.95, text, lower_bound=1e-6, upper_bound=1.0)
  flags.DEFINE_integer("seed", 0, "Seed of the draws.", lower_bound=0)


def main(values: flags.FlagValues) -> None:
  """Prints a sample and adds it to the run's report."""
  # These load JAX, which takes seconds.
  import dilocox_jax as dx
  from dilocox_jax import report
  from dilocox_jax.metrics.lines import write_atomically

  try:
    run = dx.load(values.run)
    text = _sample(run, values)
    write_atomically(run.workdir / report.SAMPLE, text)
    report.write_report(run.workdir)
  except (ValueError, RuntimeError) as error:
    raise command_line.UsageError(error) from error
  print(text)


def _sample(run, values: flags.FlagValues) -> str:
  """Returns the prompt and its continuation as text."""
  import functools

  import jax
  import numpy as np

  from dilocox_jax.models.sampling import generate
  from dilocox_jax.plan.choices import loaded
  from dilocox_jax.training.run_text import corpus

  tokenizer = corpus(run.config).tokenizer
  if tokenizer is None or not values.prompt:
    why = (
      "--prompt is empty" if tokenizer else "the run's text has no tokenizer"
    )
    raise ValueError(f"{why}: there is nothing to continue")
  (prompt,) = tokenizer.encode([values.prompt.encode()])
  shape = run.config.model.shape
  model = loaded(type(shape).builder)(shape)
  continued = jax.jit(
    functools.partial(
      generate,
      model,
      num_tokens=values.num_tokens,
      temperature=values.temperature,
      top_p=values.top_p,
    )
  )
  key = jax.random.key(values.seed)
  tokens = continued(run.params, prompt[None].astype(np.int32), key=key)
  return tokenizer.decode(np.concatenate([prompt, np.asarray(tokens)[0]]))


if __name__ == "__main__":
  command_line.main(main, define_flags)
