import pytest

from dilocox_jax.training.save_choice import (
  Save,
  chosen_save,
  order_of_processes,
)

AB, ABC = ("a", "b"), ("a", "b", "c")


def part(step, directory, members, group="g"):
  return Save(step, group, members.index(directory), members)


CASES = {
  "nobody holds anything": ([[], []], None),
  "all hold the newest": (
    [[part(20, "a", AB), part(10, "a", AB)], [part(20, "b", AB)]],
    (20, [0, 1]),
  ),
  "b was killed in the middle of the newest": (
    [[part(20, "a", AB), part(10, "a", AB)], [part(10, "b", AB)]],
    (10, [0, 1]),
  ),
  "b does not come": ([[part(20, "a", AB), part(10, "a", AB)]], (20, [0])),
  "b comes with an empty directory": (
    [[], [part(20, "a", AB), part(10, "a", ("a",))]],
    (20, [None, 0]),
  ),
  "a went on alone, and b comes back": (
    [[part(30, "a", ("a",)), part(20, "a", AB)], [part(20, "b", AB)]],
    (30, [0, None]),
  ),
  "b comes back after a while, and c does not": (
    [[part(40, "a", ("a", "c")), part(35, "a", ("a",))], [part(10, "b", ABC)]],
    (40, [0, None]),
  ),
  "they come in another order": (
    [[part(20, "b", AB)], [part(20, "a", AB)]],
    (20, [1, 0]),
  ),
  "no save is whole": (
    [[part(20, "a", AB)], [part(10, "b", AB)]],
    (20, [0, None]),
  ),
  "two groups saved one step": (
    [
      [part(20, "a", AB, "old"), part(10, "a", AB)],
      [part(20, "b", ("b", "c"), "new")],
      [part(20, "c", ("b", "c"), "new")],
    ],
    (20, [None, 0, 1]),
  ),
}


@pytest.mark.parametrize("held, expected", CASES.values(), ids=CASES.keys())
def test_the_newest_save_that_is_whole_for_the_group_is_chosen(held, expected):
  assert chosen_save(held) == expected


def test_all_choose_alike_between_two_saves_that_are_equally_good():
  held = [[part(20, "a", ("a",), "x")], [part(20, "b", ("b",), "y")]]
  assert chosen_save(held) == (20, [None, 0])
  assert chosen_save(held[::-1]) == (20, [0, None])


def test_replicas_keep_their_order_and_new_ones_come_last():
  assert order_of_processes([None, 2, None, 0]) == [3, 1, 0, 2]
  assert order_of_processes([1, 0]) == [1, 0]
