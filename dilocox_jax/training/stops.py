"""Why a run ends before its last step."""

import pathlib
import signal

from dilocox_jax.config import RunConfig


class NotFiniteError(RuntimeError):
  """A value that is not finite; the message says which and where."""


class TrainingStoppedError(RuntimeError):
  """The run cannot go on; the message says where and what to change."""


class StopRequestedError(Exception):
  """The run was asked to stop, and its state is saved.

  Attributes:
    signal: Number of the signal that asked for it.
  """

  def __init__(self, place: str, stop_signal: int):
    """Words the line for the user.

    Args:
      place: Step and directory.
      stop_signal: Number of the signal.
    """
    super().__init__(
      f"stopped by {signal.Signals(stop_signal).name}: saved at {place}; the "
      "same command goes on from there"
    )
    self.signal = stop_signal


def diverged(config: RunConfig, kept: str, workdir: pathlib.Path) -> str:
  """Says what to do about a value that is not finite.

  Args:
    config: Config of the run.
    kept: Says which checkpoint is kept.
    workdir: The run directory.
  """
  return (
    f"lower inner.learning_rate={config.inner.learning_rate} or "
    f"outer.learning_rate={config.outer.learning_rate}; {kept} in {workdir}, "
    "and a run with another rate needs another directory"
  )
