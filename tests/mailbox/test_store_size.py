"""A store holds at most as many bytes as its limit says."""

import dataclasses
import logging
import re

import numpy as np
import pytest

from dilocox_jax.mailbox_protocol.agreement import StoppedError
from dilocox_jax.mailbox_protocol.costs import storage_usd, traffic_usd
from dilocox_jax.mailbox_protocol.mailbox import Mailbox
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.mailbox_protocol.store_size import (
  OTHER_BYTES,
  check_store_bytes,
  least_store_bytes,
  store_limit,
)
from tests.mailbox.test_mailbox import Run
from tests.mailbox.world import CONFIG, SECRET

RULES = MailboxRules(replicas=3, quorum=2, grace_s=5.0)
NUM_EVENTS = 300


def run_with_limit(store_bytes, **options):
  """A run in which replicas die, come back and come late."""
  rules = dataclasses.replace(RULES, store_bytes=store_bytes)
  run = Run(rules=rules, events=NUM_EVENTS, **options)
  most_bytes = 0
  for event in range(0, NUM_EVENTS, 30):
    while min(p.toy.event for p in run.running.values()) < event:
      run.turn(run.running.values())
      num_bytes = sum(len(data) for data in run.objects.values())
      most_bytes = max(most_bytes, num_bytes)
    if event == 60:
      run.kill("c")
      run.start("c")
    if event == 120:
      run.start("d")
    if event == 180:
      run.kill("a")
      run.start("a")
  run.end()
  return run, most_bytes


def test_a_store_of_300_events_stays_below_its_limit():
  # A snapshot has 40 kB, and the messages and manifests of an event have 3 kB.
  # Without a limit, snapshots are 88 events apart, and the store has 950 kB.
  run, most_bytes = run_with_limit(2_450_000, delay=2, unused=5000)
  assert most_bytes < 2_450_000 - OTHER_BYTES
  starts = [
    int(path.split("/")[1]) for path in run.objects if path.endswith("/index")
  ]
  assert min(starts) > 250
  assert run.lists()[-1] == "abcd"


def test_the_default_follows_from_the_sizes():
  assert store_limit(None, snapshot_bytes=1000, num_replicas=4) == (
    1_000_000_000,
    (1_000_000_000 - 5 * 1000 - OTHER_BYTES) // 6,
  )
  # In an interval each of two replicas sends as many bytes as a snapshot has.
  limit = store_limit(None, snapshot_bytes=8_800_000_000, num_replicas=2)
  assert limit.interval_bytes == 2 * 8_800_000_000
  assert limit.store_bytes == 5 * 8_800_000_000 + 6 * 2 * 8_800_000_000 + 2e6


def test_a_limit_that_cannot_be_kept_is_refused_in_one_line():
  least = least_store_bytes(snapshot_bytes=1000, event_bytes=300)
  assert least == 5 * 1000 + 6 * 300 + OTHER_BYTES
  check_store_bytes(least, snapshot_bytes=1000, event_bytes=300)
  rules = MailboxRules(replicas=1, quorum=1, store_bytes=10**6)
  mailbox = Mailbox(
    Store("memory:///"), name="a", secret=SECRET, config=CONFIG, rules=rules
  )
  values = [np.zeros(100, np.float32)]
  with pytest.raises(StoppedError, match="store_bytes=1000000 is too low: 5 s"):
    mailbox.exchange(0, 0, values, snapshot=lambda: (0, values))
  assert not mailbox.usage.get("event", 0)


def test_the_log_says_what_the_store_and_its_requests_cost(caplog):
  caplog.set_level(logging.INFO)
  run = Run(rules=dataclasses.replace(RULES, snapshot_every=8), events=20)
  run.end()
  (line, *_) = [text for text in caplog.messages if text.startswith("event 8:")]
  assert re.search(r"[0-9.]+ requests, [0-9.]+ MB up and [0-9.]+ MB down", line)
  assert "the store has at most 1 GB" in line
  assert "at most 0.02 USD for the store" in line


def test_costs_are_those_of_the_price_list():
  day_s = 86_400.0
  usage = {"put": 1000, "list": 1000, "get": 10_000, "delete": 50}
  expected = 30 * (2 * 0.005 + 10 * 0.0004)
  assert traffic_usd(usage, day_s) == pytest.approx(expected)
  assert traffic_usd({"bytes_down": 10**9}, day_s) == pytest.approx(30 * 0.09)
  assert storage_usd(10**12) == pytest.approx(23)
