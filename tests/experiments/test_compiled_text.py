"""Programs are read from their text as the compiler meant them."""

import pytest

from experiments.tools.compiled_text import (
  parse,
  sent_bytes,
  transfers,
  type_bytes,
)

TEXT = """HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %x)
}

ENTRY %main.1 (p: f32[3,5]) -> u8[2,14] {
  %p = f32[3,5]{1,0:T(8,128)S(1)} parameter(0)
  %q.1 = bf16[7]{0} parameter(1), sharding={replicated}
  %r = (u8[1,9]{1,0}, /*index=1*/u8[1,9]{1,0}) custom-call(%p)
  %s = s32[] constant(3)
  %a = (f32[3,5]{1,0}, bf16[7]{0}) all-reduce(%p, %q.1), to_apply=%add
  %g = u8[1,14]{1,0} fusion(%a), calls=%add, metadata={op_name="jit(f)/while"}
  %c = (u8[1,14]{1,0}, u8[2,14]{1,0}) all-gather-start(u8[1,14]{1,0} %g)
  %d = (u8[1,14]{1,0}, u8[1,14]{1,0}) all-to-all(%g, %g), replica_groups={}
  ROOT %b = u8[2,14]{1,0} all-gather(%g), dimensions={0}
}
"""


def test_operands_of_collectives_have_their_size_and_attributes():
  module = parse(TEXT)
  main = module.computations[module.entry]
  assert [
    (each.opcode, module.operand_bytes(each))
    for each in main
    if each.opcode.startswith("all-")
  ] == [
    ("all-reduce", 60 + 14),
    ("all-gather-start", 14),
    ("all-to-all", 28),
    ("all-gather", 14),
  ]
  by_name = {each.name: each for each in main}
  assert by_name["s"].arguments == "3"
  assert by_name["g"].op_name == "jit(f)/while"
  assert by_name["g"].attribute(r"calls=%(\w+)") == "add"
  assert by_name["p"].attribute(r"calls=%(\w+)") is None


@pytest.mark.parametrize(
  "text, size",
  [
    ("f32[3,5]{1,0:T(8,128)}", 60),
    ("(u8[20,8,128]{2,1,0:T(8,128)(4,1)}, u32[], token[])", 20480 + 4),
    ("pred[7]", 7),
    ("s4[10]{0}", 5),
  ],
)
def test_types_have_the_bytes_of_their_values(text, size):
  assert type_bytes(text) == size


# Scheduled programs for two slices, written by hand after real ones.
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


def program(*instructions):
  """A program whose entry has these instructions, from number 2 on."""
  lines = ["%message = f32[10,100]{1,0} parameter(0)"]
  lines += ["%after = token[] after-all()"]
  for each in instructions:
    lines += [each] if isinstance(each, str) else each
  entry = "\n".join(f"  {line}" for line in lines)
  return parse(f"ENTRY %main (p: f32[10,100]) -> f32[] {{\n{entry}\n}}")


def test_dependent_messages_have_loops_of_their_own():
  first, second = transfers(
    program(send("a"), LOOP, done("a"), send("b"), LOOP, done("b"), LOOP)
  )
  assert (first.start, first.end, first.hidden_by) == (2, 6, (4,))
  assert second.hidden_by == (9,)


def test_transfers_that_end_before_inner_steps_are_not_hidden():
  other = LOOP.replace("inner_steps", "scan")
  for found in (
    transfers(program(LOOP, send("a"), done("a"), LOOP)),
    transfers(program(send("a"), other, done("a"))),
  ):
    assert [each.hidden_by for each in found] == [()]


@pytest.mark.parametrize(
  "transfer_type, kind, factor",
  [
    # An all-reduce of four sends 6/4 of it, an all-gather all of it to three.
    ("ALL_REDUCE", "all_reduce", 1.5),
    ("ALL_GATHER", "all_gather", 3),
    ("ONE_TO_ONE", "permute", 1),
  ],
)
def test_every_kind_sends_its_operand(transfer_type, kind, factor):
  module = program(send("a", transfer_type), done("a"))
  assert [each.kind for each in transfers(module)] == [kind]
  assert sent_bytes(module) == 4000
  assert sent_bytes(module, 4) == 4000 * factor
