"""A process ends with one line when another process of its run is gone.

python -m tests.distributed.test_lifelines PORT NUMBER is one of two processes.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from dilocox_jax.distributed import coordinator_store, processes
from dilocox_jax.distributed.lifelines import Lifelines
from dilocox_jax.threads import in_thread


def member(port, number):
  """Waits for a message that the other process never sends."""
  processes.start(f"127.0.0.1:{port}", 2, number)
  coordinator_store.allgather("")
  print("ready", flush=True)
  if number:
    coordinator_store.allgather("")
  else:
    time.sleep(600)


@contextlib.contextmanager
def two_members():
  """Two processes that wait for each other."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  command = [sys.executable, "-m", "tests.distributed.test_lifelines"]
  members = [
    subprocess.Popen(
      [*command, str(port), str(number)],
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for number in range(2)
  ]
  try:
    for each in members:
      assert each.stdout
      assert each.stdout.readline() == "ready\n"
    yield members
  finally:
    for each in members:
      each.kill()
      each.communicate()


def assert_ends_with_one_line(members, number, within_s):
  """Asserts that a process says that the other one is gone, and ends."""
  _, errors = members[number].communicate(timeout=within_s)
  [line] = errors.splitlines()
  assert line.startswith(f"error: process {number}: another process of")
  assert members[number].returncode == 75


@pytest.mark.parametrize("killed", [0, 1])
def test_who_is_left_ends_at_once_with_one_line(killed):
  with two_members() as members:
    members[killed].kill()
    assert_ends_with_one_line(members, 1 - killed, within_s=20)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_ends_both_with_one_line(frozen):
  with two_members() as members:
    members[frozen].send_signal(signal.SIGSTOP)
    start_s = time.monotonic()
    assert_ends_with_one_line(members, 1 - frozen, within_s=85)
    print(f"noticed after {time.monotonic() - start_s:.0f} s")
    members[frozen].send_signal(signal.SIGCONT)
    assert_ends_with_one_line(members, frozen, within_s=20)


def connected():
  """The two ends of a TCP connection."""
  with socket.create_server(("127.0.0.1", 0)) as server:
    end = socket.create_connection(server.getsockname())
    return end, server.accept()[0]


@pytest.fixture(name="short_times")
def short_times_fixture(monkeypatch):
  """Lets a frozen process be noticed after 2 s."""
  module = "dilocox_jax.distributed.lifelines"
  monkeypatch.setattr(f"{module}._OWN_WORDS_S", 0.1)
  monkeypatch.setattr(f"{module}._ALIVE_S", 0.1)
  monkeypatch.setattr(f"{module}._FROZEN_S", 2.0)
  monkeypatch.setattr(f"{module}._MAIN_FROZEN_S", 2.0)


@pytest.fixture(name="ends")
def ends_fixture(monkeypatch):
  """Lifelines of one connection, its other end, and what was noticed."""
  module = "dilocox_jax.distributed.lifelines"
  monkeypatch.setattr(f"{module}._OWN_WORDS_S", 0.1)
  own, other = connected()
  lost = []
  lifelines = Lifelines(lambda: lost.append(1))
  lifelines.watch({1: own})
  with other:
    yield lifelines, other, lost


def test_a_connection_that_ends_without_a_goodbye_is_noticed(ends):
  _, other, lost = ends
  other.sendall(b"by")
  other.close()
  assert is_lost(lost, 10)


@pytest.mark.parametrize("who", ["the other", "this process"])
def test_who_leaves_is_not_missed(ends, who):
  lifelines, other, lost = ends
  if who == "the other":
    other.sendall(b"bye\n")
  else:
    lifelines.leave()
    assert other.recv(10) == b"bye\n"
  other.close()
  time.sleep(0.5)
  assert not lost


def is_lost(lost, within_s):
  """Waits for a loss to be noticed, and returns whether it was."""
  end = time.monotonic() + within_s
  while not lost and time.monotonic() < end:
    time.sleep(0.01)
  return bool(lost)


@pytest.mark.skipif(
  not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no limit"
)
@pytest.mark.parametrize("number", [0, 1])
def test_bytes_that_a_machine_does_not_confirm_are_waited_for_25_s(number):
  own, other = connected()
  with other:
    lifelines = Lifelines(lambda: None)
    lifelines.watch({number: own})
    limit_ms = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    lifelines.leave()
  assert limit_ms == 25_000


@pytest.mark.usefixtures("short_times")
def test_process_0_notices_that_signs_of_life_stop():
  lost = []
  silent, other = connected()
  with other:
    Lifelines(lambda: lost.append(1)).watch({1: silent})
    assert is_lost(lost, 10), "a silent process was not noticed"


@pytest.mark.usefixtures("short_times")
def test_a_process_that_shows_life_is_not_missed():
  lost = []
  process_0, process_1 = [Lifelines(lambda: lost.append(1)) for _ in range(2)]
  first, second = connected()
  process_0.watch({1: first})
  process_1.watch({0: second})
  assert not is_lost(lost, 4.0)
  process_1.leave()
  assert not is_lost(lost, 1.0)


@contextlib.contextmanager
def relayed_client(lifelines, answers):
  """A client of process 0, behind a relay.

  Process 0 repeats what it gets while `answers.is_set()`.
  """

  def answer(service):
    connection, _ = service.accept()
    with connection:
      while asked := connection.recv(100):
        if answers.is_set():
          connection.sendall(asked)

  with socket.create_server(("127.0.0.1", 0)) as service:
    in_thread(answer, service)
    host, port = service.getsockname()
    relay = lifelines.relay(f"{host}:{port}")
    host, _, port = relay.rpartition(":")
    with socket.create_connection((host, int(port))) as client:
      yield client


def assert_is_answered(client):
  client.sendall(b"heartbeat")
  assert client.recv(100) == b"heartbeat"


@pytest.fixture(name="answers")
def answers_fixture():
  answers = threading.Event()
  answers.set()
  return answers


@pytest.mark.usefixtures("short_times")
def test_another_process_notices_that_process_0_stops_to_answer(answers):
  lost = []
  lifelines = Lifelines(lambda: lost.append(1))
  with relayed_client(lifelines, answers) as client:
    time.sleep(3.0)  # Before the run process 0 may be silent.
    own, other = connected()
    lifelines.watch({0: own})
    for _ in range(10):
      assert_is_answered(client)
      time.sleep(0.3)
    assert not lost
    answers.clear()
    client.sendall(b"heartbeat")
    assert is_lost(lost, 10), "a frozen process 0 was not noticed"
    other.close()


@pytest.mark.usefixtures("short_times")
def test_a_process_that_stood_still_itself_does_not_blame_process_0(answers):
  lost = []
  lifelines = Lifelines(lambda: lost.append(1))
  with relayed_client(lifelines, answers) as client:
    own, other = connected()
    lifelines.watch({0: own})
    assert_is_answered(client)
    time.sleep(0.3)  # The relay waits for the next answer.
    # `PyDLL` keeps the interpreter busy, so the relay cannot forward. This
    # takes longer than process 0 may be silent (`short_times`).
    ctypes.PyDLL(None).sleep(4)
    for _ in range(10):
      assert_is_answered(client)
      time.sleep(0.2)
    assert not lost
    other.close()


if __name__ == "__main__":
  member(int(sys.argv[1]), int(sys.argv[2]))
