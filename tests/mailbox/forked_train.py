"""Training processes that are forked from one that has imported everything.

Importing JAX and the trainer takes longer than a small run. A process that has
imported them and has not started JAX yet can be forked as often as needed.
"""

import os
import signal
import sys
import time
import traceback

from absl import app

from dilocox_jax import report
from dilocox_jax.training import trainer  # noqa: F401
from experiments.runtime import config_flag, running  # noqa: F401


def fork(arguments, log):
  """Starts `experiments.train` in a fork, and returns its process id.

  Args:
    arguments: Flags of the program.
    log: File to which the output is appended.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  pid = os.fork()
  if pid:
    return pid
  try:
    with open(log, "ab", buffering=0) as file:
      os.dup2(file.fileno(), 1)
      os.dup2(file.fileno(), 2)
    _train(arguments)
  except SystemExit as ended:
    code = ended.code
    if code is None or isinstance(code, int):
      os._exit(code or 0)
    print(code, file=sys.stderr, flush=True)
    os._exit(1)
  except BaseException:
    traceback.print_exc()
    os._exit(1)
  finally:
    os._exit(0)


def _train(arguments):
  from experiments import train

  setattr(report, "write_report", lambda workdir: workdir)
  sys.argv = ["train", *arguments]
  app.run(train.main, flags_parser=config_flag.parse_flags)


def wait(pid, timeout_s):
  """Returns the exit code of a fork; None if it still runs after a time."""
  end = time.monotonic() + timeout_s
  while time.monotonic() < end:
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
      return os.waitstatus_to_exitcode(status)
    time.sleep(0.05)
  return None


def kill(pid):
  """Kills a fork that may have ended already."""
  os.kill(pid, signal.SIGKILL)
  os.waitpid(pid, 0)
