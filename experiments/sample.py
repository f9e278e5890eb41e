"""Lets the model of a run continue a text.

  python -m experiments.sample --run=runs/x --prompt='def main' --num_tokens=200

Prints the prompt and what follows. With --temperature=0 the likeliest token is
taken every time. The run's report shows the last sample.
"""

from absl import flags

from experiments.runtime import command_line, own_parts


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
  flags.DEFINE_integer("seed", 0, "Seed of the draws.", lower_bound=0)


def main(values: flags.FlagValues) -> None:
  """Prints a sample and adds it to the run's report."""
  own_parts.register_parts(values.parts)
  # These load JAX, which takes seconds.
  from experiments.runtime.samples import Draw, add_sample

  draw = Draw(
    values.prompt,
    values.num_tokens,
    values.temperature,
    values.top_p,
    values.seed,
  )
  try:
    print(add_sample(values.run, draw))
  except (ValueError, RuntimeError) as error:
    raise command_line.UsageError(error) from error


if __name__ == "__main__":
  command_line.main(main, define_flags)
