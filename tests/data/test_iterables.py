"""Batches of an iterable go on where they were, whatever it keeps."""

import itertools
import json
from typing import Any

import numpy as np
import pytest

from dilocox_jax.data.iterables import Drawn

LENGTH = 5  # Batches of a pass.


def numbers(drawn, first, count):
  return [int(drawn.batch(number)) for number in range(first, first + count)]


def check_goes_on(source, *, counts=range(1, 4 * LENGTH)):
  """A run that is resumed draws what one that is not draws.

  Args:
    source: Function that makes the data anew.
    counts: After how many batches it is stopped.
  """
  whole = numbers(Drawn(source()), 0, 6 * LENGTH)
  for count in counts:
    first = Drawn(source())
    numbers(first, 0, count)
    saved = json.loads(json.dumps(first.get_state()))
    again = Drawn(source())
    numbers(again, 0, 1)  # What is held out is drawn first.
    if saved is not None:
      again.set_state(saved)
    found = numbers(again, count, 6 * LENGTH - count)
    assert found == whole[count:], f"after {count} batches"


class Pass:
  """One pass over shuffled numbers, with a position."""

  def __init__(self, seed):
    self.order = np.random.default_rng(seed).permutation(LENGTH)
    self.at = 0

  def __iter__(self):
    return self

  def __next__(self):
    if self.at == LENGTH:
      raise StopIteration
    self.at += 1
    return self.order[self.at - 1]

  def get_state(self):
    return self.at

  def set_state(self, at):
    self.at = at


class CountsPasses:
  """Shuffles by the number of the pass, which no state holds."""

  def __init__(self):
    self.passes = 0

  def __iter__(self):
    self.passes += 1
    return Pass(self.passes)


class OfSource:
  """Shuffles by the number of the pass; the source has the state."""

  def __init__(self):
    self.passes = self.at = 0

  def __iter__(self):
    while self.at < LENGTH:
      self.at += 1
      yield np.random.default_rng(self.passes).permutation(LENGTH)[self.at - 1]
    self.passes = self.passes + 1
    self.at = 0

  def state_dict(self):
    return {"passes": self.passes, "at": self.at}

  def load_state_dict(self, state):
    self.passes = state["passes"]
    self.at = state["at"]


@pytest.mark.parametrize("source", [CountsPasses, OfSource])
def test_a_run_goes_on_in_the_pass_in_which_it_was(source):
  check_goes_on(source)


class BufferShuffledExamplesIterable:
  """Stands for the step of Hugging Face that shuffles."""


class Outside:
  """Stands for a step that wraps others."""

  def __init__(self, *steps):
    self.ex_iterables = list(steps)


class OfHuggingFace:
  """Goes on at the last state that was loaded, in every pass from then on."""

  __module__ = "datasets.iterable_dataset"

  def __init__(self, step: Any = None):
    self._ex_iterable = step
    self._start = None
    self._at = 0

  def __iter__(self):
    self._at = 0 if self._start is None else self._start
    while self._at < LENGTH:
      self._at += 1
      yield self._at

  def state_dict(self):
    return self._at

  def load_state_dict(self, state):
    self._start = state


def test_a_streamed_data_set_begins_again_at_its_start():
  check_goes_on(OfHuggingFace)
  assert Drawn(OfHuggingFace()).get_state() is not None


def test_a_state_without_its_shuffle_buffer_is_not_taken():
  def source():
    step = Outside(Outside(), Outside(BufferShuffledExamplesIterable()))
    return OfHuggingFace(step)

  assert Drawn(source()).get_state() is None
  check_goes_on(source)


def test_an_iterator_ends_where_it_cannot_begin_again():
  drawn = Drawn(itertools.islice(itertools.count(), 3))
  with pytest.raises(ValueError, match="ended after 3 batches, and the run"):
    numbers(drawn, 0, 4)


def test_only_the_last_batch_is_kept():
  drawn = Drawn(iter("abc"))
  assert drawn.batch(1) == "b"
  assert drawn.batch(1) == "b"
  with pytest.raises(ValueError, match="batch 0 is past: 2 batches were drawn"):
    drawn.batch(0)
