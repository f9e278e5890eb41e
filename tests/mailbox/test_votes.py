"""Whose messages count, if the shared states of their senders differ."""

import numpy as np
import pytest

from dilocox_jax.mailbox_protocol.fingerprints import (
  SharedState,
  fingerprint_of,
)
from dilocox_jax.mailbox_protocol.messages import Message
from dilocox_jax.mailbox_protocol.votes import vote
from dilocox_jax.reference.fingerprint import random_signs

SIGNS = random_signs("run", 5, 100)
NAME = "ab" * 32


def message(value, name=NAME):
  state = fingerprint_of([np.full(100, value, np.float32)], SIGNS)
  return Message(b"", 1.0, [], SharedState(name, 0, state))


def votes(*values, **options):
  """The vote of replicas "0", "1", ... with these values as their states."""
  sent = {str(n): message(value) for n, value in enumerate(values)}
  return vote(sent, before=NAME, event=5, **options)


@pytest.mark.parametrize(
  ("states", "left_out"),
  [
    ((1,), ""),
    ((1, 1, 1), ""),
    ((1, 1 + 1e-6, 1 - 1e-6), ""),  # Rounding.
    ((2, 1, 1), "0"),
    ((1, 1, 2), "2"),
    ((3, 1, 2, 1), "02"),
    ((1, 1, np.nan), "2"),
  ],
)
def test_the_state_of_most_counts(states, left_out):
  result = votes(*states)
  assert "".join(result.left_out) == left_out and not result.is_split
  for reason in result.left_out.values():
    assert reason.startswith("its shared state differs: block 0 of 1 by ")


@pytest.mark.parametrize("states", [(1, 2), (1, 2, 3), (1, 2, 1, 2)])
def test_of_states_that_are_as_frequent_none_counts_at_first(states):
  result = votes(*states)
  assert result.is_split and len(result.left_out) == len(states)


@pytest.mark.parametrize(
  ("states", "left_out"),
  [((1, 2), "1"), ((1, 2, 3), "12"), ((1, 2, 1, 2), "13"), ((2, 1, 1), "0")],
)
def test_at_a_second_time_the_earliest_of_them_counts(states, left_out):
  result = votes(*states, breaks_ties=True)
  assert sorted(result.left_out) == list(left_out) and not result.is_split


def test_a_state_with_another_name_is_not_compared():
  sent = {"a": message(1, "cd" * 32), "b": message(1), "c": message(1)}
  result = vote(sent, before=NAME, event=5)
  assert result.left_out == {"a": "it follows other lists of messages"}
  assert not result.is_split
  assert len(vote(sent, before="", event=5).left_out) == 3
