import subprocess
import sys

import pytest

from experiments.runtime import link_check

MODULE = [sys.executable, "-m", "experiments.runtime.link_check"]


def test_a_transfer_is_timed_from_its_first_byte_to_its_last():
  listening = subprocess.Popen(
    [*MODULE, "receive", "0"], stdout=subprocess.PIPE, text=True
  )
  with listening:
    assert listening.stdout
    port = int(listening.stdout.readline())
    link_check.send("127.0.0.1", port, 2_000_000)
    assert float(listening.stdout.readline()) > 1e6  # Nothing throttles it.


def test_nobody_listening_is_an_error():
  with pytest.raises(OSError):
    link_check.send("127.0.0.1", 1, 10)
