import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys, threading
from experiments.runtime import background_errors
background_errors.shorten()
{body}
"""
LATE = """
loop = asyncio.new_event_loop()
loop.close()
loop.call_soon_threadsafe(print)
"""
UNRAISABLE = """
class Task:
  def __del__(self):
    raise RuntimeError("{reason}")
task = Task()
del task
"""
THREAD = """
def write():
  raise {error}
thread = threading.Thread(target=write)
thread.start()
thread.join()
"""


def errors(body):
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM.format(body=body)],
    capture_output=True,
    text=True,
  )
  return done.stderr


def test_a_result_that_comes_too_late_says_nothing():
  assert errors(LATE) == ""
  assert "Traceback" in errors("raise RuntimeError('another')")


def test_nor_does_one_that_nobody_can_handle():
  late = "Event loop is closed"
  assert errors(UNRAISABLE.format(reason=late)) == ""
  assert "Traceback" in errors(UNRAISABLE.format(reason="another"))


def test_a_thread_whose_disk_is_full_says_so_in_one_line():
  full = 'OSError(28, "No space left on device")'
  assert errors(THREAD.format(error=full)) == (
    "a thread could not write: [Errno 28] No space left on device\n"
  )


@pytest.mark.parametrize("error", ["ValueError('wrong')", "KeyError(3)"])
def test_other_errors_of_threads_keep_their_traceback(error):
  assert "Traceback" in errors(THREAD.format(error=error))
