"""Sends the rows of a run to Weights & Biases.

This log needs the extra `wandb` (`pip install 'dilocox_jax[wandb]'`). With the
environment variable WANDB_MODE=offline it writes to the run directory and sends
nothing.
"""

import uuid

from dilocox_jax.checks import extra_package, printable
from dilocox_jax.metrics.lines import (
  RecordError,
  make_directory,
  write_atomically,
)
from dilocox_jax.metrics.run_logs import LogStart, Row, RunLog, scalars
from dilocox_jax.metrics.work_directory import check_subfolder

FOLDER = "wandb"  # In the run directory. The package uses the same name.
_ID = "dilocox_jax_run.txt"  # File in the folder with the id of the run.


class WandbLog(RunLog):
  """Sends the numbers of rows as a history over the number of inner steps.

  A run that continues from a checkpoint also continues its history in W&B, if
  it has one. The points of all steps after the checkpoint are sent again.
  """

  def __init__(self, project: str = "dilocox_jax"):
    """Imports the package `wandb`. No run is started yet.

    Args:
      project: Name of the project in W&B. Account and server are settings of
        the package, for example of its command `wandb login`.

    Raises:
      ValueError: One line, if the package is not installed.
    """
    self._package = extra_package("wandb", "it", extra="wandb")
    self._project = project

  def open(self, start: LogStart) -> None:
    """Starts the run in W&B, or continues the run.

    Raises:
      RefusedError: If `wandb` in the run directory is a link or no folder.
      RecordError: One line, if W&B refuses, e.g. because nobody has logged in,
        or if the run directory cannot be written.
    """
    folder = make_directory(check_subfolder(start.workdir, FOLDER))
    path = folder / _ID
    # A new run in an old directory gets a new id. With the old id it would
    # continue the history of another run.
    if start.resume_step is None or not path.exists():
      write_atomically(path, uuid.uuid4().hex)
    try:
      self._run = self._package.init(
        project=self._project,
        name=start.workdir.name,
        id=path.read_text(),
        resume="allow",
        dir=str(start.workdir),
        config=dict(start.config),
      )
    except self._package.errors.Error as error:
      raise RecordError(f"log wandb: {printable(str(error))}") from error
    self._run.define_metric("*", step_metric="step")

  def write(self, row: Row) -> None:
    """Adds the numbers of a row to the history, with the row's step."""
    self._run.log({"step": row["step"], **scalars(row)})

  def close(self, error: BaseException | None) -> None:
    """Ends the run in W&B. The run counts as failed if an error ends it."""
    self._run.finish(exit_code=0 if error is None else 1)
