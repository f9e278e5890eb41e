"""Programs are read from their text as the compiler meant them."""

import pytest

from experiments.compilation import hlo
from experiments.compilation.transfers import inside_kind

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
    (inside_kind(each), module.operand_bytes(each))
    for each in module.computations["main.1"]
    if inside_kind(each)
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


def test_a_bracket_that_is_never_closed_is_refused():
  with pytest.raises(ValueError, match="never closed"):
    hlo.parse("ENTRY %f (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0\n}")
