"""Reads the text of a compiled program (XLA's HLO).

XLA has no public way to walk through a compiled program, but its text is
regular. A program is a list of computations, and a computation is a list of
instructions in the order in which they run, if the program is scheduled:

    %name = f32[4,8]{1,0} opcode(%operand, ...), attribute=value, ...
"""

import dataclasses
import functools
import math
import re

from dilocox_jax.rounds.window import INNER_STEPS

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(
  r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$"
)
_ITEM_BITS = {"pred": 8, "token": 0}


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    name: Its name in its computation, without "%".
    type: Type of the result, e.g. "f32[4,8]{1,0}", or several in brackets.
    opcode: Operation, e.g. "all-reduce".
    arguments: Text of the operands, or of a constant's value.
    attributes: Text behind the operands.
  """

  name: str
  type: str
  opcode: str
  arguments: str
  attributes: str

  @property
  def operands(self) -> list[str]:
    """Names of the operands."""
    return re.findall(r"%([\w.-]+)", self.arguments)

  def attribute(self, pattern: str) -> str | None:
    """Returns the first group of a pattern in the attributes, or None."""
    found = re.search(pattern, self.attributes)
    return found[1] if found else None

  @property
  def op_name(self) -> str:
    """Place in the traced program, e.g. "jit(f)/inner_steps/while"."""
    return self.attribute(r'op_name="([^"]*)"') or ""


@dataclasses.dataclass(frozen=True)
class Module:
  """A compiled program.

  Attributes:
    computations: Instructions of every computation by its name, in order.
    entry: Name of the computation with which the program starts.
  """

  computations: dict[str, tuple[Instruction, ...]]
  entry: str

  @functools.cached_property
  def types(self) -> dict[str, str]:
    """Types by name of instruction; a program names each one differently."""
    return {
      each.name: each.type
      for instructions in self.computations.values()
      for each in instructions
    }

  def operand_bytes(self, instruction: Instruction) -> int:
    """Returns the size of an instruction's operands (bytes)."""
    return sum(type_bytes(self.types[name]) for name in instruction.operands)


def parse(text: str) -> Module:
  """Reads a compiled program, as `compiled.as_text()` has it."""
  computations: dict[str, list[Instruction]] = {}
  entry = ""
  current = computations.setdefault("", [])
  for line in text.splitlines():
    if start := _COMPUTATION.match(line):
      current = computations.setdefault(start[1], [])
      entry = start[1] if line.startswith("ENTRY") else entry
    elif found := _INSTRUCTION.match(line):
      name, kind, opcode, rest = found.groups()
      # Behind the operands there are attributes, or nothing.
      arguments, *attributes = re.split(r"\)(?=, |$)", rest, maxsplit=1)
      current.append(
        Instruction(name, kind, opcode, arguments, "".join(attributes))
      )
  return Module({n: tuple(c) for n, c in computations.items() if c}, entry)


def type_bytes(text: str) -> int:
  """Returns the size of an array, or of several, from their type (bytes)."""
  total = 0
  for item, sizes in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", text):
    found = re.search(r"\d+", item)
    bits = _ITEM_BITS.get(item, int(found[0]) if found else 0)
    total += math.prod(int(n) for n in sizes.split(",") if n) * bits // 8
  return total


def is_inner_loop(instruction: Instruction) -> bool:
  """Whether an instruction is a loop over inner steps."""
  place = instruction.op_name.split("/")[-2:]
  return instruction.opcode == "while" and place == [INNER_STEPS, "while"]
