"""Whether the devices of several processes are what a run needs."""

import pytest

from dilocox_jax.config import from_mapping
from experiments.runtime import distributed_flags
from experiments.runtime.command_line import UsageError

CONFIG = from_mapping({"mesh": {"layout": "mesh", "num_replicas": 4}})


def test_as_many_devices_of_each_process_are_enough():
  distributed_flags.check_devices(CONFIG, [0, 0, 1, 1])
  distributed_flags.check_devices(CONFIG, [3, 1, 2, 0])


@pytest.mark.parametrize(
  "owners, reason",
  [
    ([0, 0, 0, 1], "processes have 1 to 3 devices"),
    ([0, 0, 1], "processes have 1 to 2 devices"),
    ([0, 1], "have 2 devices together, and the run needs 4"),
    ([0, 0, 0, 1, 1, 1], "have 6 devices together, and the run needs 4"),
  ],
)
def test_others_are_refused(owners, reason):
  with pytest.raises(UsageError, match=reason):
    distributed_flags.check_devices(CONFIG, owners)
