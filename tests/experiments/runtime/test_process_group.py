"""Groups of plain Python processes, which start in no time."""

import os
import sys
import time

import pytest

from experiments.runtime.command_line import TRY_AGAIN
from experiments.runtime.process_group import Group, Member

WAIT = "import time; time.sleep(600)"
DIE = "import os, time; time.sleep(1.5); os.kill(os.getpid(), 9)"


def group(*programs):
  return Group(
    [
      Member(number, [sys.executable, "-c", program], os.environ)
      for number, program in enumerate(programs)
    ]
  )


def is_alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


def test_a_group_that_ends_well_has_no_failure(capfd):
  complain = "import sys; print('disk is slow', file=sys.stderr)"
  assert group("print('done')", complain).run() is None
  out, errors = capfd.readouterr()
  assert out == "done\n"
  assert errors == "process 1: disk is slow\n"


def test_one_that_fails_ends_all_others(tmp_path):
  path = tmp_path / "pid"
  wait = f"import os; open({str(path)!r}, 'w').write(str(os.getpid())); {WAIT}"
  until = f"import os, time\nwhile not os.path.exists({str(path)!r}):\n"
  failure = group(wait, until + "  time.sleep(0.01)\nraise SystemExit(3)").run()
  assert failure and failure.exit_code == 3 and not failure.is_from_outside
  assert "process 1 failed with exit code 3" in failure.reason
  while not (text := path.read_text()):
    time.sleep(0.01)
  assert not is_alive(int(text))


@pytest.mark.parametrize(
  "consequence", [f"raise SystemExit({TRY_AGAIN})", "import os; os.abort()"]
)
def test_the_cause_is_named_though_a_consequence_shows_first(consequence):
  failure = group(consequence, DIE).run()
  assert failure and failure.reason == "process 1 was killed by SIGKILL"
  assert failure.exit_code == 128 + 9 and failure.is_from_outside


def test_a_consequence_without_a_cause_is_a_failure_too(monkeypatch):
  monkeypatch.setattr("experiments.runtime.process_group._SETTLE_S", 0.1)
  failure = group(WAIT, f"raise SystemExit({TRY_AGAIN})").run()
  assert failure and failure.exit_code == TRY_AGAIN and failure.is_from_outside


def test_where_all_have_failed_no_cause_is_waited_for():
  again = f"raise SystemExit({TRY_AGAIN})"
  failure = group(again, again).run()
  assert failure and failure.exit_code == TRY_AGAIN


def test_the_error_line_is_the_reason_and_the_noise_of_others_is_dropped(
  tmp_path, capfd
):
  path = tmp_path / "ready"
  error = f"""
import os, sys, time
while not os.path.exists({str(path)!r}):
  time.sleep(0.01)
print("noise of runtimes", file=sys.stderr)
print("error: process 1: no space", file=sys.stderr)
sys.exit(1)
"""
  noise = f"""
import pathlib, signal, sys, time
def end(*signal):
  print("my peers are gone", file=sys.stderr, flush=True)
  sys.exit(1)
signal.signal(signal.SIGTERM, end)
pathlib.Path({str(path)!r}).touch()
time.sleep(600)
"""
  failure = group(WAIT, error, noise).run()
  assert failure and failure.reason == "process 1: no space"
  assert failure.exit_code == 1 and not failure.is_from_outside
  assert "gone" not in capfd.readouterr().err


def test_a_traceback_is_shown_with_the_number_of_its_process(capfd):
  failure = group(WAIT, "raise KeyError('lost')").run()
  assert failure and failure.exit_code == 1
  assert "process 1: KeyError: 'lost'" in capfd.readouterr().err
