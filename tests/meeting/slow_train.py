"""`experiments.train` with a small model and without pictures.

Where a test names a file, rounds take a while until it is there.
"""

import functools
import logging
import os
import pathlib
import time

from dilocox_jax import report
from dilocox_jax.data.streams import ReplicaStreams
from experiments import train
from experiments.runtime import command_line, running
from tests import runs

HURRY, ROUND_S = "TEST_HURRY", 1.5
# What takes the place of which attribute.
SMALL = (
  (running, "Trainer", functools.partial(running.Trainer, parts=runs.TINY)),
  (report, "write_report", lambda workdir: workdir),
)

if __name__ == "__main__":
  take = ReplicaStreams.take

  def slowly(*given):
    if not pathlib.Path(os.environ.get(HURRY, "/")).exists():
      time.sleep(ROUND_S)
    return take(*given)

  for each in (*SMALL, (ReplicaStreams, "take", slowly)):
    setattr(*each)
  logging.getLogger().handlers.clear()  # A library has set one by now.
  command_line.main(train.main, train.define_flags)
