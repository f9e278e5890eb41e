"""Lets the model of a run continue a text.

  python -m experiments.sample --run=runs/x --prompt='def main' --num_tokens=200

Prints the prompt and its continuation. With --temperature=0 the likeliest token
is taken every time. The run's report shows the last sample.
"""

from collections.abc import Sequence

from absl import app, flags

from experiments.runtime import command_line, parts_flag, run_flag, samples

flags.adopt_module_key_flags(run_flag)
_PROMPT = flags.DEFINE_string(
  "prompt",
  None,
  "Text to continue; by default the first tokens of the validation text.",
)
_NUM_TOKENS = flags.DEFINE_integer(
  "num_tokens",
  200,
  "Number of tokens to draw.",
  lower_bound=1,
  upper_bound=samples.MOST_TOKENS,
)
_TEMPERATURE = flags.DEFINE_float(
  "temperature",
  0.8,
  "Divides the logits; 0 takes the likeliest token.",
  lower_bound=0.0,
)
_TOP_P = flags.DEFINE_float(
  "top_p",
  0.95,
  "Share of the probability from which tokens are drawn.",
  lower_bound=1e-6,
  upper_bound=1.0,
)
_SEED = flags.DEFINE_integer(
  "seed",
  0,
  "Seed of the draws.",
  lower_bound=0,
  upper_bound=samples.LARGEST_SEED,
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Prints a sample of the model of --run, and adds it to the run's report."""
  command_line.refuse_arguments(argv)
  parts_flag.register()
  with command_line.usage_errors(kinds=(ValueError, RuntimeError)):
    sample = samples.add_sample(
      run_flag.RUN.value,
      num_tokens=_NUM_TOKENS.value,
      prompt=_PROMPT.value,
      temperature=_TEMPERATURE.value,
      top_p=_TOP_P.value,
      seed=_SEED.value,
    )
  samples.print_sample(sample)


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
