"""Programs are read from their text as the compiler meant them."""

import pytest

from experiments.tools import compiled_text as hlo
from experiments.tools.compiled_text import (
  sent_bytes,
  transfers,
)

TEXT = """HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main.1 (p: f32[3,5]) -> u8[2,14] {
  %p = f32[3,5]{1,0:T(8,128)S(1)} parameter(0)
  %q.1 = bf16[7]{0} parameter(1), sharding={replicated}
  %r = (u8[1,9]{1,0}, /*index=1*/u8[1,9]{1,0}) custom-call(%p)
  %s = s32[] constant(3)
  %t.2 = pred[] compare(%s, %s), direction=LT
  %a = (f32[3,5]{1,0}, bf16[7]{0}) all-reduce(%p, %q.1), to_apply=%add
  %g = u8[1,14]{1,0} fusion(%a), calls=%add, metadata={op_name="jit(f)/while"}
  %c = (u8[1,14]{1,0}, u8[2,14]{1,0}) all-gather-start(u8[1,14]{1,0} %g)
  %d = (u8[1,14]{1,0}, u8[1,14]{1,0}) all-to-all(%g, %g), replica_groups={}
  %e = s32[] all-reduce(%s), to_apply=%add
  ROOT %b = u8[2,14]{1,0} all-gather(%g), dimensions={0}
}
"""


def test_operands_of_collectives_have_their_size():
  module = hlo.parse(TEXT)
  assert module.entry == "main.1"
  found = [
    (each.opcode.removesuffix("-start"), module.operand_bytes(each))
    for each in module.computations["main.1"]
    if each.opcode.startswith("all-")
  ]
  assert found == [
    ("all-reduce", 60 + 14),
    ("all-gather", 14),
    ("all-to-all", 28),
    ("all-reduce", 4),
    ("all-gather", 14),
  ]


def test_instructions_keep_their_order_and_attributes():
  main = hlo.parse(TEXT).computations["main.1"]
  assert [each.name for each in main][:4] == ["p", "q.1", "r", "s"]
  by_name = {each.name: each for each in main}
  assert by_name["s"].arguments == "3"
  assert by_name["g"].op_name == "jit(f)/while"
  assert by_name["g"].attribute(r"calls=%(\w+)") == "add"
  assert by_name["p"].attribute(r"calls=%(\w+)") is None
  assert by_name["t.2"].operands == ["s", "s"]


@pytest.mark.parametrize(
  "text, size",
  [
    ("f32[3,5]{1,0:T(8,128)}", 60),
    ("(u8[20,8,128]{2,1,0:T(8,128)(4,1)}, u32[], token[])", 20480 + 4),
    ("pred[7]", 7),
    ("s4[10]{0}", 5),
    ("token[]", 0),
  ],
)
def test_types_have_the_bytes_of_their_values(text, size):
  assert hlo.type_bytes(text) == size


# Scheduled programs for two slices, written by hand after real ones.
_CHANNEL = (
  'frontend_attributes={{_xla_host_transfer_rendezvous="{0}",'
  '_xla_megascale_transfer_type="{1}"}}'
)
_LOOP = (
  'condition=%cond, body=%body, metadata={op_name="jit(f)/inner_steps/while"}'
)


def send(name, kind="ALL_REDUCE", operand="%message"):
  channel = _CHANNEL.format(name, kind)
  state = "(f32[10,100]{1,0:T(8,128)}, u32[], token[])"
  return [
    f"%send.{name} = {state} send({operand}, %after), {channel}",
    f"%recv.{name} = {state} recv(%after), {channel}",
  ]


def done(name):
  return [
    f"%send-done.{name} = token[] send-done(%send.{name})",
    f"%recv-done.{name} = (f32[10,100]{{1,0}}, token[]) "
    f"recv-done(%recv.{name})",
  ]


def loop(name):
  return [f"%while.{name} = (s32[], f32[4]{{0}}) while(%carry), {_LOOP}"]


def program(*instructions):
  """Text of a program whose entry has these instructions."""
  lines = [line for part in instructions for line in part]
  entry = "\n".join(f"  {line}" for line in lines)
  return f"""HloModule jit_f, is_scheduled=true

%cond (c: (s32[], f32[4])) -> pred[] {{
  %c = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}}

%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {{
  ROOT %b = (s32[], f32[4]{{0}}) parameter(0)
}}

ENTRY %main (p: f32[10,100]) -> f32[] {{
  %message = f32[10,100]{{1,0}} parameter(0)
  %carry = (s32[], f32[4]{{0}}) parameter(1)
  %after = token[] after-all()
{entry}
  ROOT %end = f32[] constant(0)
}}
"""


FIRST = 3  # Number of the first instruction that is handed in.
HIDDEN = program(send("a"), loop(1), done("a"), send("b"), loop(2), done("b"))
EXPOSED = program(send("a"), done("a"), send("b"), done("b"), loop(1), loop(2))


def found(text):
  return transfers(hlo.parse(text))


def test_dependent_messages_have_loops_of_their_own():
  first, second = found(HIDDEN)
  start = FIRST
  assert (first.start, first.end) == (start, start + 4)
  assert first.hidden_by == (start + 2,)
  assert second.hidden_by == (start + 7,)


def test_transfers_that_end_before_the_loops_are_not_hidden():
  assert [each.hidden_by for each in found(EXPOSED)] == [(), ()]


def test_a_loop_behind_the_end_does_not_count():
  text = program(loop(0), send("a"), done("a"), loop(1))
  assert found(text)[0].hidden_by == ()


def test_other_loops_do_not_count():
  assert found(HIDDEN.replace("inner_steps", "scan"))[0].hidden_by == ()


@pytest.mark.parametrize(
  "transfer_type, kind",
  [
    ("ALL_REDUCE", "all_reduce"),
    ("ALL_GATHER", "all_gather"),
    ("ONE_TO_ONE", "permute"),
  ],
)
def test_every_kind_sends_its_operand_to_the_other_slice(transfer_type, kind):
  text = program(send("a", transfer_type), done("a"))
  assert found(text)[0].kind == kind
  assert found(text)[0].operand_bytes == 4000
  assert sent_bytes(hlo.parse(text)) == 4000
  # An all-reduce of four sends 6/4 of it, an all-gather all of it to three.
  factor = {"all_reduce": 1.5, "all_gather": 3, "permute": 1}[kind]
  assert sent_bytes(hlo.parse(text), 4) == 4000 * factor
