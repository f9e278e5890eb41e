import json
import time

import pytest

from experiments.real_links.changing_link import ChangingLink


class Network:
  """Notes what its links became."""

  addresses = ("a", "b")

  def __init__(self):
    self.changes = []

  def throttle(self, node, link):
    self.changes.append((node, link.up_bit_per_s))


def test_a_change_that_comes_a_round_too_late_is_told(tmp_path, capsys):
  timing = tmp_path / "timing.jsonl"
  row = json.dumps({"step": 1, "event": "round", "wall_s": 1.5}) + "\n"

  class Slow(Network):
    def throttle(self, node, link):
      super().throttle(node, link)
      if timing.exists() and not node:
        with timing.open("a") as file:
          file.write(row)  # A round ends while the link changes.

  network = Slow()
  with ChangingLink(network, timing, lambda walls: 1e6 * bool(walls)):  # type: ignore
    timing.write_text(row)
    deadline = time.monotonic() + 10
    while len(network.changes) < 4 and time.monotonic() < deadline:
      time.sleep(0.01)
  assert "the link changed so late" in capsys.readouterr().err


def test_a_link_changes_when_a_round_ends_and_only_then(tmp_path):
  network, timing = Network(), tmp_path / "timing.jsonl"
  rates = [10e6, 10e6, 2e6]

  def add(event):
    with timing.open("a") as file:
      file.write(json.dumps({"step": 1, "event": event, "wall_s": 1.5}) + "\n")

  def settle(count):
    deadline = time.monotonic() + 10
    while len(network.changes) < count and time.monotonic() < deadline:
      time.sleep(0.01)

  with ChangingLink(network, timing, lambda walls: rates[len(walls)]):  # type: ignore
    for event in ("round", "checkpoint"):
      add(event)
    time.sleep(0.1)
    assert sorted(network.changes) == [(0, 10e6), (1, 10e6)]
    add("round")
    settle(4)
  assert sorted(network.changes[2:]) == [(0, 2e6), (1, 2e6)]


def test_a_change_that_fails_is_raised_at_the_end(tmp_path):
  timing = tmp_path / "timing.jsonl"

  class Broken(Network):
    def throttle(self, node, link):
      super().throttle(node, link)
      if timing.exists():
        raise OSError("tc is gone")

  network = Broken()

  def runs():
    row = json.dumps({"step": 1, "event": "round", "wall_s": 1.5})
    timing.write_text(row + "\n")
    deadline = time.monotonic() + 10
    while len(network.changes) < 3 and time.monotonic() < deadline:
      time.sleep(0.01)

  with (
    pytest.raises(OSError, match="tc is gone"),
    ChangingLink(network, timing, lambda walls: 1e6 * bool(walls)),  # type: ignore
  ):
    runs()
