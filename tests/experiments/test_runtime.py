"""What programs share: cores, locks, signals, flags of XLA, groups, parts."""

import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dilocox_jax.config import from_mapping
from experiments.runtime import (
  ends_with_parent,
  placement,
  process_group,
  running,
  stop_signals,
)
from experiments.runtime.command_line import TRY_AGAIN, UsageError
from experiments.runtime.parts_flag import register_parts
from experiments.runtime.process_group import Member, run_together


def test_a_process_with_one_core_has_a_second_thread_that_multiplies_nothing(
  monkeypatch,
):
  monkeypatch.setattr(process_group, "usable_cores", lambda: 4)
  monkeypatch.setattr(os, "environ", {"XLA_FLAGS": "--xla_a=1"})
  for count, flag in (2, ""), (4, " --xla_cpu_multi_thread_eigen=false"):
    found = process_group.environment(count)
    assert found["NPROC"] == found["OMP_NUM_THREADS"] == "2"
    assert found["XLA_FLAGS"] == f"--xla_a=1{flag}"


@pytest.mark.parametrize(
  "owners, word",
  [
    ([0, 0, 1, 1], ""),
    ([0, 0, 0, 1], "have 1 to 3 devices each, 4 together, and"),
    ([0, 1], "have 1 device each, 2 together, and the run needs 4"),
    ([0, 0, 0, 1, 1, 1], "have 3 devices each, 6 together"),
  ],
)
def test_devices_of_processes_are_as_many_as_the_run_needs(owners, word):
  config = from_mapping({"mesh": {"layout": "mesh", "num_replicas": 4}})
  if not word:
    placement.check_devices(config, owners)
    return
  with pytest.raises(UsageError, match=word):
    placement.check_devices(config, owners)


def test_processes_of_a_replica_that_meets_others_have_its_devices_alone():
  config = from_mapping(
    {
      "mesh": {"layout": "mesh", "num_replicas": 4, "num_data_shards": 2},
      "exchange.collective": "mailbox",
    }
  )
  placement.check_devices(config, [0, 1])
  assert placement.devices_each(config, 2) == 1
  product = "num_stages=1 x num_tensor_shards=1 of one replica"
  with pytest.raises(UsageError, match=product):
    placement.check_devices(config, [0, 0, 1, 1])
  with pytest.raises(UsageError, match=product):
    placement.devices_each(config, 3)


@pytest.mark.parametrize(
  ("local_devices", "num_processes", "count"),
  [(3, 2, 3), (None, 2, 2), (None, 4, 1), (None, None, 0)],
)
def test_a_cpu_stands_for_its_share_of_the_devices(
  local_devices, num_processes, count
):
  config = from_mapping({"mesh": {"layout": "mesh", "num_replicas": 4}})
  process = placement.ProcessSettings(
    coordinator=None,
    num_processes=num_processes,
    process_id=None,
    local_devices=local_devices,
    start_timeout_s=1.0,
  )
  assert process.num_devices(config) == count


def test_memory_that_a_program_has_freed_serves_the_next_one():
  running._keep_memory()

  def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert b"x" * 2**26
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

  new_pages()
  assert new_pages() < 10


# Flags of XLA.


def test_the_installed_xla_knows_the_flag_and_the_users_come_last(monkeypatch):
  for plugins, flags in (
    (("no_such_plugin",), "--a=1"),
    (("json",), f"{running.XLA_GPU_FLAG} --a=1"),
  ):
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    monkeypatch.setattr(running, "_GPU_PLUGINS", plugins)
    running._set_xla_flags()
    assert os.environ["XLA_FLAGS"] == flags
  # A flag that is there twice is no error.
  twice = f"{running.XLA_GPU_FLAG} {running.XLA_GPU_FLAG[:-4]}false"
  command = [sys.executable, "-c", "import jax; jax.devices()"]
  done = subprocess.run(
    command, env=os.environ | {"XLA_FLAGS": twice}, capture_output=True
  )
  assert done.returncode == 0, done.stderr.decode()[-500:]


# Signals.


def wait_until(condition):
  deadline = time.monotonic() + 600
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_signals_ask_once_and_then_do_what_they_did_before():
  asked = []
  before = signal.getsignal(signal.SIGINT)
  with stop_signals.stop_requests(asked.append):
    for _ in range(2):  # Two at once count as one.
      os.kill(os.getpid(), signal.SIGINT)
    wait_until(lambda: asked)
  assert asked == [signal.SIGINT]
  assert signal.getsignal(signal.SIGINT) == before


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
  codes = []
  reader, writer = os.pipe()

  def leave(code):
    codes.append(code)
    os.close(writer)

  monkeypatch.setattr(stop_signals, "_SAME_REQUEST_S", -1.0)
  monkeypatch.setattr(stop_signals.os, "_exit", leave)
  os.write(writer, bytes([signal.SIGINT, signal.SIGTERM]))
  stop_signals._watch(reader, lambda number: None)
  os.close(reader)
  assert codes == [128 + signal.SIGTERM]


def test_a_run_that_still_compiles_its_first_program_ends_at_once(
  monkeypatch, capsys
):
  trainer = mock.Mock(has_begun=False)
  # A real end does not return.
  leave = mock.Mock(side_effect=SystemExit)
  monkeypatch.setattr(running.processes, "exit_now", leave)
  stop = running.stopper(trainer)
  with pytest.raises(SystemExit):
    stop(signal.SIGTERM)
  leave.assert_called_once_with(128 + signal.SIGTERM)
  assert not trainer.request_stop.called
  (line,) = capsys.readouterr().err.splitlines()
  assert "stopped by SIGTERM before the first segment" in line
  trainer.has_begun = True
  stop(signal.SIGINT)
  trainer.request_stop.assert_called_once_with(signal.SIGINT)
  leave.assert_called_once()


# Groups of plain Python processes, which start in no time.

WAIT = "import time; time.sleep(600)"
AGAIN = f"raise SystemExit({TRY_AGAIN})"
DIE = "import os, time; time.sleep(0.7); os.kill(os.getpid(), 9)"


def members_of(*programs):
  return [
    Member(number, [sys.executable, "-c", program], os.environ)
    for number, program in enumerate(programs)
  ]


def group(*programs):
  return run_together(members_of(*programs))


def test_a_group_that_ends_well_has_no_failure(capfd):
  complain = "import sys; print('disk is slow', file=sys.stderr)"
  assert group("print('done')", complain) is None
  out, errors = capfd.readouterr()
  assert out == "done\n" and errors == "process 1: disk is slow\n"


@pytest.mark.parametrize("consequence", [AGAIN, "import os; os.abort()"])
def test_the_cause_is_named_though_a_consequence_shows_first(
  consequence, monkeypatch
):
  monkeypatch.setattr("experiments.runtime.process_group._SETTLE_S", 600.0)
  failure = group(consequence, DIE)
  assert failure and failure.reason == "process 1 was killed by SIGKILL"
  assert failure.exit_code == 128 + 9 and failure.is_from_outside


@pytest.mark.parametrize(
  ("programs", "reason", "code"),
  [
    (["exit(130)", AGAIN], "process 1 failed with exit code 75", TRY_AGAIN),
    (["exit(143)", "pass", AGAIN], "process 2 failed with exit", TRY_AGAIN),
    (["exit(130)", AGAIN, DIE], "process 2 was killed by SIGKILL", 128 + 9),
    (["exit(130)", DIE], "process 1 was killed by SIGKILL", 128 + 9),
  ],
)
def test_a_process_that_fails_during_a_stop_is_what_counts(
  programs, reason, code, monkeypatch
):
  monkeypatch.setattr("experiments.runtime.process_group._SETTLE_S", 600.0)
  failure = group(*programs)
  assert failure and failure.reason.startswith(reason)
  assert failure.exit_code == code and not failure.is_stop


def test_a_stop_of_all_is_a_stop():
  failure = group("pass", "exit(143)")
  assert failure and failure.exit_code == 143 and failure.is_stop


def test_a_consequence_without_a_cause_is_a_failure_too(monkeypatch):
  monkeypatch.setattr("experiments.runtime.process_group._SETTLE_S", 0.1)
  failure = group(WAIT, AGAIN)
  assert failure and failure.exit_code == TRY_AGAIN and failure.is_from_outside


def test_one_that_fails_ends_all_and_the_noise_of_others_is_dropped(
  capfd, monkeypatch
):
  error = "import os, time; time.sleep(0.5)\n"
  error += "os.write(2, b'noise\\nerror: process 1: no space\\n'); os._exit(1)"
  noise = "import sys; print('up', file=sys.stderr, flush=True)\n" + WAIT
  members = members_of(WAIT, error, noise)

  def sleep(seconds):
    """Looks again only when process 1 has ended, however long that takes."""
    while members[1].exit_code is None:
      time.sleep(seconds)

  clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
  monkeypatch.setattr(process_group, "time", clock)
  failure = run_together(members)
  assert failure and failure.reason == "process 1: no space"
  assert failure.exit_code == 1 and not failure.is_from_outside
  assert "noise" not in capfd.readouterr().err


class FailsAtOnce:
  """A member that writes and fails after one look at it, before the second."""

  def __init__(self):
    self._looks = 0
    self.shown = []

  def _has_failed(self):
    self._looks += 1
    return self._looks > 1

  def new_lines(self):
    return ["noise"] if self._has_failed() else []

  @property
  def exit_code(self):
    return 1 if self._has_failed() else None

  def show(self, lines):
    self.shown += lines


def test_what_a_process_writes_while_it_fails_is_not_shown():
  member: Any = FailsAtOnce()
  assert process_group._first_failed([member]) is member
  assert not member.shown


def test_a_traceback_is_shown_with_the_number_of_its_process(capfd):
  failure = group(WAIT, "raise KeyError('lost')")
  assert failure and failure.exit_code == 1
  assert "process 1: KeyError: 'lost'" in capfd.readouterr().err


LAUNCHES = """
import os, sys
from experiments.runtime.process_group import Member, run
write = "open(sys.argv[1], 'w').write(str(os.getpid()))"
wait = f"import os, sys, time; {write}; time.sleep(600)"
run([
  Member(number, [sys.executable, "-c", wait, path], os.environ)
  for number, path in enumerate(sys.argv[1:])
])
"""
linux_needed = pytest.mark.skipif(
  not sys.platform.startswith("linux"), reason="no such signal"
)


def is_running(pid):
  """Whether a process runs; a zombie, which nobody has waited for, does not."""
  found = ["ps", "-o", "state=", "-p", str(pid)]
  state = subprocess.run(found, capture_output=True, text=True).stdout
  return state.strip() not in ("", "Z")


@linux_needed
def test_a_group_ends_with_a_launcher_that_is_killed(tmp_path):
  files = [tmp_path / "0", tmp_path / "1"]
  launcher = subprocess.Popen([sys.executable, "-c", LAUNCHES, *files])
  wait_until(lambda: all(each.exists() and each.read_text() for each in files))
  pids = [int(each.read_text()) for each in files]
  assert all(map(is_running, pids))
  launcher.kill()
  launcher.wait()
  wait_until(lambda: not any(map(is_running, pids)))


@linux_needed
def test_a_command_whose_parent_has_ended_does_not_start():
  command = ends_with_parent.ending_with_this_process(["echo", "started"])
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.stdout == "started\n" and not done.returncode
  command[-3] = "1"  # What has ended may be anybody but our own parent.
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 1 and not done.stdout
  assert done.stderr == "error: the process 1 that started this one has ended\n"


def test_a_command_that_is_not_there_is_one_line():
  failure = run_together([Member(0, ["no-such-program"], os.environ)])
  assert failure and failure.exit_code == 1


# Parts of the user's own.


def test_what_is_no_python_is_refused(tmp_path):
  (tmp_path / "mine.txt").write_text("x")
  with pytest.raises(ValueError, match="NameError: name 'x'"):
    register_parts([str(tmp_path / "mine.txt")])


def test_a_dataclass_of_the_file_finds_its_module(tmp_path):
  # A file may have any suffix, as a config file may.
  file = tmp_path / "part.cfg"
  file.write_text(
    "from __future__ import annotations\nimport dataclasses, typing\n"
    "@dataclasses.dataclass\nclass Part:\n  n: typing.ClassVar[int] = 1\n"
    "assert not dataclasses.fields(Part)\n"
  )
  register_parts([str(file)])
