"""Rounds whose replicas are apart and meet in a store."""

import logging
import threading
import time

import numpy as np
import pytest

from dilocox_jax.mailbox_protocol.messages import snapshot_path
from dilocox_jax.mailbox_protocol.store import Store, StoreUnavailableError
from tests.mailbox import apart
from tests.outer.problem import assert_close, assert_equal
from tests.tiers import slow


def all_alone(name, factors=(1, 1), wrong_event=None, store=None, **limits):
  """What each of the replicas that are apart has at the end."""
  store = store or Store("memory:///")
  rules = apart.rules(len(factors), **limits)

  def replica(number):
    return apart.alone(
      store, name, number, factors[number], wrong_event, rules=rules
    )

  return apart.in_threads(replica, len(factors), store)


@pytest.mark.parametrize(
  "name",
  ["diloco", "overlap_loco", "dilocox", "delayed", *slow("streaming_diloco")],
)
def test_apart_is_as_together(name):
  losses, outer = apart.together(name, 2, own=slice(2))
  found = all_alone(name)
  for number, (own_losses, own_outer) in enumerate(found):
    assert_equal(own_outer, found[0][1])
    assert_close(own_outer, outer, 1e-6)
    assert_close(own_losses[0], losses[number], 1e-6)
  assert np.ptp(losses, axis=0).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", apart.METHODS)
def test_a_bucket_and_a_folder_give_the_same_bits(name, bucket, tmp_path):
  through = Store(f"s3://bucket/{name}", **bucket)
  for own, other in zip(
    all_alone(name, store=Store(f"file://{tmp_path}")),
    all_alone(name, store=through),
    strict=True,
  ):
    assert_equal(own, other)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize(
  ("name", "factor"),
  [
    *(("diloco", -10.0), ("diloco", np.nan)),
    *slow(("diloco", 1e3), ("diloco", 1e12)),
    *slow(("dilocox", -10.0), ("dilocox", np.nan)),
  ],
)
def test_who_sends_wrong_values_is_as_one_who_is_absent(
  name, factor, is_apart, caplog
):
  caplog.set_level(logging.INFO)
  losses, outer = apart.together(name, 2, own=slice(0, 3, 2))
  factors = 1.0, factor, 1.0
  if is_apart:
    (first, found), _, (last, _) = all_alone(name, factors, max_norm_ratio=5.0)
    own = np.concatenate([first, last])
    for event in range(apart.ROUNDS):
      assert caplog.text.count(f"event {event}: r1 is left out: its ") == 3
  else:
    own, found = apart.together(name, 3, factors)
    own = own[::2]
  assert_close(own, losses, 1e-6)
  assert_close(found, outer, 1e-6)


@pytest.mark.parametrize(
  "name, fragments", [("overlap_loco", 2), *slow(("dilocox", 1))]
)
def test_who_sent_wrong_values_once_counts_again_in_the_next_event(
  name, fragments, caplog
):
  caplog.set_level(logging.INFO)
  found = all_alone(name, (1, 1e3, 1), wrong_event=4, max_norm_ratio=5.0)
  assert caplog.text.count("r1 is left out: its ") == 3 * fragments
  assert_equal(found[1][1], found[0][1])


def test_messages_wait_for_no_snapshot_and_one_that_fails_is_said(
  tmp_path, caplog
):
  ended = threading.Event()

  class Slow(Store):
    def put(self, path, data):
      if path == snapshot_path(0, "arrays"):
        raise StoreUnavailableError("no space")
      assert not path.endswith("arrays") or ended.wait(120)
      super().put(path, data)

  store = Slow(tmp_path)
  all_alone("diloco", store=store, snapshot_every=3)
  assert caplog.messages == ["snapshot before event 0 failed: no space"]
  assert not any(path.endswith("index") for path in store.sizes("snapshot"))
  ended.set()
  while not any(path.endswith("index") for path in store.sizes("snapshot")):
    time.sleep(0.01)
