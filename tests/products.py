"""Counts the matrix products of a program compiled for CPUs, from its text.

XLA's own cost analysis takes a loop for one round of it, and both branches of
a conditional as run.
"""

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from tests import compiled_text as hlo
from tests.compiled_text import Instruction, Module

# How often a loop or branch runs whenever control comes to it, by the name of
# its operation and the number of the branch (None for a loop). A mean may be a
# fraction; floats would not add up to what the model needs.
Rounds = Callable[[str, int | None], Fraction | int]
# Size in one instruction, e.g. its products or its bytes on a link.
Count = Callable[[Module, Instruction], int]


def _unknown(name: str, branch: int | None) -> int:
  raise ValueError(f"{name}: rounds of {branch=} are not in the program")


def product_flops(text: str | None, rounds: Rounds = _unknown) -> Fraction:
  """Operations in matrix products; a multiply-add counts as two.

  Args:
    text: A compiled program, as `compiled.as_text()` has it.
    rounds: Of what the program does not say itself: loops whose number of
      rounds is not known, and branches.
  """
  assert text, "the program has no text"
  return total(hlo.parse(text), instruction_flops, rounds)


def total(
  module: Module, count: Count, rounds: Rounds, name: str | None = None
) -> Fraction:
  """Adds something up over all instructions, as often as they run.

  Args:
    module: A compiled program.
    count: What an instruction counts for, once.
    rounds: As for `product_flops`.
    name: Computation with which to begin; None: the program's entry.
  """
  found = Fraction(0)
  for instruction in module.computations[name or module.entry]:
    found += count(module, instruction)
    for callee, times in _callees(module, instruction, rounds):
      found += times * total(module, count, rounds, callee) if times else 0
  return found


def _callees(
  module: Module, instruction: Instruction, rounds: Rounds
) -> Iterator[tuple[str, Fraction | int]]:
  """Yields what an instruction calls, and how often."""
  match instruction.opcode:
    case "while":
      body = instruction.attribute(r"body=%?([\w.-]+)")
      assert body, instruction
      yield body, _rounds(module, instruction, rounds)
    case "conditional":
      yield from _branches(instruction, rounds)
    case _:
      pattern = r"(?:calls|to_apply|called_computations)=\{?%?([\w.-]+)"
      for callee in re.findall(pattern, instruction.attributes):
        yield callee, 1


def instruction_flops(module: Module, instruction: Instruction) -> int:
  """Operations of one instruction, if it is a product of matrices."""
  match instruction.opcode:
    case "dot":
      return _dot_flops(module, instruction)
    case "custom-call":
      target = instruction.attribute(r'custom_call_target="([^"]*)"') or ""
      assert not re.search("dot|matmul|gemm", target.lower()), target
  return 0


def _dot_flops(module: Module, instruction: Instruction) -> int:
  operand = type_shape(module.types[instruction.operands[0]])
  contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
  sizes = [operand[int(axis)] for axis in contracted.split(",") if axis]
  return 2 * math.prod(type_shape(instruction.type)) * math.prod(sizes)


def _rounds(module: Module, loop: Instruction, rounds: Rounds):
  known = loop.attribute(r'known_trip_count":\{"n":"(\d+)"')
  if known is None:
    known = _bound(module, loop)
  return rounds(loop.op_name, None) if known is None else int(known)


def _bound(module: Module, loop: Instruction) -> str | None:
  """Returns the constant with which a loop compares its counter, if any.

  JAX's loops count from 0 in steps of 1, so this is their number of rounds.
  """
  condition = module.computations[
    loop.attribute(r"condition=%?([\w.-]+)") or module.entry
  ]
  constants = {
    each.name: each.arguments for each in condition if each.opcode == "constant"
  }
  for each in condition:
    if each.opcode == "compare" and "direction=LT" in each.attributes:
      return constants.get(each.operands[-1])
  return None


def _branches(
  instruction: Instruction, rounds: Rounds
) -> list[tuple[str, Fraction | int]]:
  listed = instruction.attribute(r"branch_computations=\{([^}]*)\}")
  if listed:
    branches = re.findall(r"%?([\w.-]+)", listed)
  else:  # Of a condition that is true or false; false is number 0.
    branches = [
      instruction.attribute(rf"{value}_computation=%?([\w.-]+)") or ""
      for value in ("false", "true")
    ]
  return [
    (branch, rounds(instruction.op_name, number))
    for number, branch in enumerate(branches)
  ]


def type_shape(text: str) -> list[int]:
  """Returns the sizes of an array from its type."""
  found = re.match(r"\w+\[([\d,]*)\]", text)
  return [int(n) for n in found[1].split(",") if n] if found else []
