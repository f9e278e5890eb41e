"""Writes the rows of a run as curves for TensorBoard.

This log needs the extra `tensorboard` (`pip install
'dilocox_jax[tensorboard]'`).
"""

from dilocox_jax.checks import extra_package
from dilocox_jax.metrics.run_logs import LogStart, Row, RunLog, scalars
from dilocox_jax.metrics.work_directory import check_subfolder

FOLDER = "tensorboard"  # In the run directory.


class TensorBoardLog(RunLog):
  """Writes curves to the folder `tensorboard` of the run directory.

  The axis of all curves is the number of finished inner steps. A run that
  continues hides the old points after its checkpoint, and writes new ones.
  """

  def __init__(self):
    """Imports `tensorboardX`; raises ValueError if it is not installed."""
    self._package = extra_package("tensorboardX", "it", extra="tensorboard")

  def open(self, start: LogStart) -> None:
    """Starts a file of events in the run directory.

    Raises:
      RefusedError: If `tensorboard` in the run directory is a link or no
        folder.
    """
    folder = check_subfolder(start.workdir, FOLDER)
    first_step = 0
    purge_step = None
    if start.resume_step is not None:
      first_step = start.resume_step + 1
      purge_step = first_step
    self._writer = self._package.SummaryWriter(
      logdir=str(folder),
      purge_step=purge_step,
      # The name of the file also has the time in seconds. Without this suffix,
      # two starts within a second would write to the same file.
      filename_suffix=f".from_{first_step}",
    )

  def write(self, row: Row) -> None:
    """Adds a point to the curve of each number of a row."""
    for name, value in scalars(row).items():
      self._writer.add_scalar(name, value, row["step"])
    # A killed run should leave its curves up to the last row.
    self._writer.flush()

  def close(self, error: BaseException | None) -> None:
    """Closes the file of events."""
    del error  # The curves tell nothing about it.
    self._writer.close()
