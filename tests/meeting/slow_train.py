"""`experiments.train` whose rounds take a while, until a file is there."""

import os
import pathlib
import time

from dilocox_jax.data.streams import ReplicaStreams
from experiments import train
from experiments.runtime import command_line

HURRY, ROUND_S = "TEST_HURRY", 1.5

if __name__ == "__main__":
  take = ReplicaStreams.take

  def slowly(*given):
    if not pathlib.Path(os.environ[HURRY]).exists():
      time.sleep(ROUND_S)
    return take(*given)

  setattr(ReplicaStreams, "take", slowly)  # noqa: B010 - for pyright.
  command_line.main(train.main, train.define_flags)
