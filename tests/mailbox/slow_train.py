"""`experiments.train` with a small model and without pictures.

Where a test names a file, rounds take a while until it is there.
"""

import logging
import os
import pathlib
import time

from absl import app

from dilocox_jax import report
from dilocox_jax.data.streams import ReplicaStreams
from dilocox_jax.training import start
from experiments.runtime import config_flag
from tests import runs

HURRY = "TEST_HURRY"
ROUND_S = 1.5
# What takes the place of which attribute.
SMALL = (
  (start, "with_trainable", lambda config: runs.TINY),
  (report, "write_report", lambda workdir: workdir),
)

if __name__ == "__main__":
  from experiments import train

  take = ReplicaStreams.take

  def slowly(*given):
    if not pathlib.Path(os.environ.get(HURRY, "/")).exists():
      time.sleep(ROUND_S)
    return take(*given)

  for each in (*SMALL, (ReplicaStreams, "take", slowly)):
    setattr(*each)
  logging.getLogger().handlers.clear()  # A library has set one by now.
  app.run(train.main, flags_parser=config_flag.parse_flags)
