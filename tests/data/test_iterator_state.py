"""The state of an iterator comes back as it was, or is refused in one line."""

import collections
import dataclasses
import enum
import itertools
import json
import random

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dilocox_jax.data.iterator_state import decoded, encoded

GENERATOR = np.random.default_rng(0)
SAME = [
  *(None, True, 0, -1, 2**53, 2**53 + 1, -(2**200)),
  *(1.5, -0.0, float("nan"), float("inf"), -float("inf"), 1 + 2j),
  *("", "text", "\ud800", b"", b"\x00x", bytearray(b"q")),
  *([], [1, [2]], (), (1, (None,)), {1, "a"}, frozenset({(1, 2)})),
  *({}, {"b": 1, "a": 2}, {1: 2, (1, 2): 3, None: 4, 2.5: 5, b"k": 6}),
  *({"kind": "tuple", "value": [1]}, {"hex": "00"}),
  collections.OrderedDict(b=1, a=2),
  *(np.int64(3), np.uint8(3), np.float32(1.5), np.float64("nan")),
  *(np.bool_(True), np.str_(""), np.str_("ab"), np.bytes_(b"x")),
  *(np.float16(-0.0), np.complex64(1j), ml_dtypes.bfloat16(1.5)),
  *(np.datetime64("2020-01-01"), np.datetime64("NaT", "D")),
  *(np.arange(6).reshape(2, 3).T, np.zeros((0, 3)), np.array(3.0)),
  *(np.array([1, 2], ">i4"), np.array([True]), np.array(["a", "bcd"])),
  np.array([1, 2], ml_dtypes.bfloat16),
  GENERATOR.bit_generator.state,
  np.random.MT19937(1).state,
  np.random.RandomState(0).get_state(),
  random.Random(3).getstate(),
]


@pytest.mark.parametrize("number", range(len(SAME)))
def test_a_state_comes_back_with_its_types_and_values(number):
  state = SAME[number]
  text = json.dumps(encoded({"state": state}, "Loader"), allow_nan=False)
  found = decoded(json.loads(text))["state"]
  assert type(found) is type(state)
  assert repr(found) == repr(state)  # So are types and signs inside of it.
  assert getattr(found, "dtype", None) == getattr(state, "dtype", None)
  if isinstance(state, np.ndarray):
    np.testing.assert_array_equal(found, state)
    assert found.flags.writeable


class Level(enum.IntEnum):
  LOW = 1


@dataclasses.dataclass
class Position:
  count: int


Pair = collections.namedtuple("Pair", "first second")  # noqa: PYI024
CIRCLE: list = []
CIRCLE.append(CIRCLE)
REFUSED = {
  r"state is a .*Level": Level.LOW,
  r"state is a .*Pair": Pair(1, 2),
  r"state\['a'\]\[1\] is a .*Position": {"a": [0, Position(1)]},
  r"state \(the key <Level.LOW: 1>\) is a .*Level": {Level.LOW: 1},
  r"state \(the element .*\) is a .*Pair": {Pair(1, 2)},
  r"state is a collections.deque": collections.deque(),
  r"state is a collections.defaultdict": collections.defaultdict(int),
  r"state is a numpy.ma.*MaskedArray": np.ma.array([1]),
  r"state is an array of object": np.array([None]),
  r"state is an array of \[\('a'": np.zeros(2, [("a", "i4")]),
  r"state is a numpy.longlong": np.longlong(3),
  r"state is a numpy.random.*Generator": GENERATOR,
  r"state is a .*Array": jnp.ones(2),
  r"state is a itertools.count": itertools.count(),
  "contains itself": CIRCLE,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_not_come_back_as_it_was_is_refused_by_its_place(message):
  with pytest.raises(ValueError, match=message) as error:
    encoded(REFUSED[message], "Loader")
  line = str(error.value)
  assert "\n" not in line and line.startswith("the state of Loader cannot be")


def test_what_is_saved_shares_nothing_with_the_iterator():
  state = {"left": [1, 2], "buffer": np.arange(3)}
  saved = encoded(state, "Loader")
  state["left"].clear()
  state["buffer"][:] = 0
  first = decoded(saved)
  second = decoded(saved)
  assert first["left"] == [1, 2] and first["buffer"].tolist() == [0, 1, 2]
  first["left"].clear()
  assert second["left"] == [1, 2]


def test_a_state_of_another_version_is_refused():
  with pytest.raises(ValueError, match="has a 'list of lists', which this"):
    decoded({"kind": "list of lists", "value": []})
