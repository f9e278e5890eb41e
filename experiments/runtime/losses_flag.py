"""The flag --losses: two losses of AllReduce that the user has measured."""

from absl import flags

from dilocox_jax.gap.gain import gain_of_losses
from dilocox_jax.gap.law import Estimate
from experiments.runtime import command_line
from experiments.runtime.command_line import UsageError

LOSSES = flags.DEFINE_list(
  "losses",
  None,
  "Two losses of AllReduce after the steps of the run: with B / 2 sequences in"
  " a step, and with the B sequences of all replicas. The expected gap follows"
  " from them.",
)


def losses() -> tuple[float, float] | None:
  """Returns AllReduce's losses with B / 2 and with B sequences in a step.

  They are the value of --losses; None if the flag is not given. B is the number
  of sequences of all replicas in a step.

  Raises:
    UsageError: If they are not two positive losses of which the second is
      lower.
  """
  if LOSSES.value is None:
    return None
  try:
    numbers = [float(text) for text in LOSSES.value]
  except ValueError:
    raise UsageError(
      f"--losses={','.join(LOSSES.value)} must be two numbers, such as"
      " --losses=1.69,1.59"
    ) from None
  with command_line.usage_errors("--losses: "):
    gain_of_losses(numbers)  # Only to check the numbers.
  half, full = numbers
  return half, full


def gain() -> Estimate | None:
  """Returns by which share AllReduce's loss falls if its batch doubles.

  The share and its range follow from --losses; None if the flag is not given.

  Raises:
    UsageError: If --losses has not two positive losses of which the second is
      lower.
  """
  half_and_full = losses()
  return None if half_and_full is None else gain_of_losses(half_and_full)
