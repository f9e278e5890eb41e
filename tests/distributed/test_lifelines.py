"""A process ends with one line when another process of its run is gone.

python -m tests.distributed.test_lifelines PORT NUMBER is one of two processes.
"""

import os
import socket
import subprocess
import sys
import time

import pytest

from dilocox_jax.distributed import coordinator_store, processes
from dilocox_jax.distributed.lifelines import Lifelines


def member(port, number):
  """Waits for a message that the other process never sends."""
  processes.start(f"127.0.0.1:{port}", 2, number)
  coordinator_store.allgather("")
  print("ready", flush=True)
  if number:
    coordinator_store.allgather("")
  else:
    time.sleep(600)


@pytest.mark.parametrize("killed", [0, 1])
def test_who_is_left_ends_at_once_with_one_line(killed):
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
    members[killed].kill()
    _, errors = members[1 - killed].communicate(timeout=20)
  finally:
    for each in members:
      each.kill()
      each.communicate()
  [line] = errors.splitlines()
  assert line.startswith(f"error: process {1 - killed}: another process of")
  assert members[1 - killed].returncode == 75


@pytest.fixture(name="ends")
def ends_fixture(monkeypatch):
  """Lifelines of one connection, its other end, and what was noticed."""
  module = "dilocox_jax.distributed.lifelines"
  monkeypatch.setattr(f"{module}._OWN_WORDS_S", 0.1)
  server = socket.create_server(("127.0.0.1", 0))
  own = socket.create_connection(server.getsockname())
  other, _ = server.accept()
  lost = []
  lifelines = Lifelines(lambda: lost.append(1))
  lifelines.watch({1: own})
  with server, other:
    yield lifelines, other, lost


def test_a_connection_that_ends_without_a_goodbye_is_noticed(ends):
  _, other, lost = ends
  other.sendall(b"by")
  other.close()
  end = time.monotonic() + 10
  while not lost and time.monotonic() < end:
    time.sleep(0.01)
  assert lost


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


if __name__ == "__main__":
  member(int(sys.argv[1]), int(sys.argv[2]))
