"""Signals to small Python processes, which start in no time."""

import signal
import subprocess
import sys
import threading

import pytest

from experiments.runtime import stop_signals

# The main thread sleeps in one call, as it does while it waits for devices.
PROGRAM = """
import sys, time
from experiments.runtime import stop_signals

def request(number):
  print(f"asked by {number}", flush=True)

with stop_signals.stop_requests(request):
  print("ready", flush=True)
  sys.stdin.readline()
print("end", flush=True)
"""


@pytest.fixture(name="process")
def process_fixture():
  with subprocess.Popen(
    [sys.executable, "-c", PROGRAM],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout and process.stdout.readline() == "ready\n"
    yield process
    process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_changes_nothing_else(process, number):
  process.send_signal(number)
  assert process.stdout.readline() == f"asked by {int(number)}\n"
  out, _ = process.communicate("go on\n", timeout=60)
  assert out == "end\n" and process.returncode == 0


def test_two_signals_at_once_count_as_one(process):
  for _ in range(2):
    process.send_signal(signal.SIGINT)
  assert process.stdout.readline() == f"asked by {int(signal.SIGINT)}\n"
  out, _ = process.communicate("go on\n", timeout=60)
  assert out == "end\n" and process.returncode == 0


def test_a_second_signal_ends_the_process_at_once(process):
  process.send_signal(signal.SIGINT)
  assert process.stdout.readline().startswith("asked by")
  threading.Event().wait(stop_signals._SAME_REQUEST_S + 0.2)
  process.send_signal(signal.SIGTERM)
  assert process.wait(60) == 128 + signal.SIGTERM


def test_what_signals_did_before_they_do_again():
  before = [signal.getsignal(number) for number in stop_signals.SIGNALS]
  with stop_signals.stop_requests(lambda number: None):
    inside = [signal.getsignal(number) for number in stop_signals.SIGNALS]
  after = [signal.getsignal(number) for number in stop_signals.SIGNALS]
  assert after == before and inside != before
