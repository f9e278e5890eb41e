"""Transfers between slices are read from a program as the compiler meant them.

The programs are scheduled, and written by hand after real ones.
"""

import pytest

from experiments.tools.compiled_transfers import transfers

_CHANNEL = (
  'frontend_attributes={{_xla_host_transfer_rendezvous="{0}",'
  '_xla_megascale_transfer_type="{1}"}}'
)
_STATE = "(f32[10,100]{1,0:T(8,128)}, u32[], token[])"
LOOP = (
  "%while = (s32[], f32[4]{0}) while(%carry), condition=%cond, body=%body,"
  ' metadata={op_name="jit(f)/inner_steps/while"}'
)


def send(name, kind="ALL_REDUCE"):
  channel = _CHANNEL.format(name, kind)
  return [
    f"%send.{name} = {_STATE} send(%message, %after), {channel}",
    f"%recv.{name} = {_STATE} recv(%after), {channel}",
  ]


def done(name):
  return [
    f"%send-done.{name} = token[] send-done(%send.{name})",
    f"%recv-done.{name} = (f32[10,100]{{1,0}}, token[]) "
    f"recv-done(%recv.{name})",
  ]


def loops(*instructions):
  """For each transfer of a program the numbers of the lines that hide it."""
  lines = ["HloModule f, is_scheduled=true"]
  for each in instructions:
    lines += [each] if isinstance(each, str) else each
  return [found.loops for found in transfers("\n  ".join(lines))]


def test_dependent_messages_have_loops_of_their_own():
  found = loops(send("a"), LOOP, done("a"), send("b"), LOOP, done("b"), LOOP)
  assert found == [(3,), (8,)]


def test_transfers_that_end_before_inner_steps_are_not_hidden():
  other = LOOP.replace("inner_steps", "scan")
  assert loops(LOOP, send("a"), done("a"), LOOP) == [()]
  assert loops(send("a"), other, done("a")) == [()]


@pytest.mark.parametrize(
  "transfer_type, kind, factor",
  [
    # An all-reduce of four sends 6/4 of it, an all-gather all of it to three.
    ("ALL_REDUCE", "all_reduce", 1.5),
    ("ALL_GATHER", "all_gather", 3),
    ("ALL_TO_ALL", "all_to_all", 0.75),
    ("ONE_TO_ONE", "permute", 1),
  ],
)
def test_bytes_of_transfers_follow_from_their_kind(transfer_type, kind, factor):
  (found,) = transfers("\n".join([*send("a", transfer_type), *done("a")]))
  assert (found.kind, found.operand_bytes) == (kind, 4000)
  assert found.sent_bytes(4) == factor * 4000
