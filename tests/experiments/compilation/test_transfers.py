"""Transfers between slices are found, with what hides them."""

import functools

import pytest

from experiments.compilation import hlo
from experiments.compilation.flops import total
from experiments.compilation.transfers import sent_bytes, transfers
from tests.experiments.compilation import programs


def found(text):
  return transfers(hlo.parse(text))


def test_dependent_messages_have_loops_of_their_own():
  first, second = found(programs.HIDDEN)
  start = programs.FIRST
  assert (first.start, first.end) == (start, start + 4)
  assert first.hidden_by == (start + 2,)
  assert second.hidden_by == (start + 7,)


def test_transfers_that_end_before_the_loops_are_not_hidden():
  assert [each.hidden_by for each in found(programs.EXPOSED)] == [(), ()]


def test_a_loop_behind_the_end_does_not_count():
  text = programs.program(
    programs.loop(0), programs.send("a"), programs.done("a"), programs.loop(1)
  )
  assert found(text)[0].hidden_by == ()


def test_other_loops_do_not_count():
  assert (
    found(programs.HIDDEN.replace("inner_steps", "scan"))[0].hidden_by == ()
  )


@pytest.mark.parametrize(
  "transfer_type, kind",
  [
    ("ALL_REDUCE", "all_reduce"),
    ("ALL_GATHER", "all_gather"),
    ("ONE_TO_ONE", "permute"),
  ],
)
def test_every_kind_sends_its_operand_to_the_other_slice(transfer_type, kind):
  text = programs.program(programs.send("a", transfer_type), programs.done("a"))
  assert found(text)[0].kind == kind
  assert found(text)[0].operand_bytes == 4000
  assert total(hlo.parse(text), sent_bytes, lambda *_: 1) == 4000
  # An all-reduce of four sends 6/4 of it, an all-gather all of it to three.
  of_four = functools.partial(sent_bytes, num_replicas=4)
  factor = {"all_reduce": 1.5, "all_gather": 3, "permute": 1}[kind]
  assert total(hlo.parse(text), of_four, lambda *_: 1) == 4000 * factor
