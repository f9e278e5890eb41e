"""Matrix products and memory of a compiled program, products from its text.

XLA's own cost analysis takes a loop for one round of it, and both branches of
a conditional as run.
"""

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

import jax

# How often a loop or branch runs whenever control comes to it, by the name of
# its operation and the number of the branch (None for a loop). A mean may be a
# fraction; floats would not add up to what the model needs.
Rounds = Callable[[str, int | None], Fraction | int]

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_SHAPE = re.compile(r"^\w+\[([\d,]*)\]")


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
  computations, entry = _parse(text)

  def flops(name: str) -> Fraction:
    total = Fraction(0)
    for own, callees in _costs(computations[name], rounds):
      total += own
      total += sum(times * flops(callee) for callee, times in callees)
    return total

  return flops(entry)


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
  """What a program needs beside its arguments and results (bytes)."""
  memory = compiled.memory_analysis()
  assert memory is not None
  return memory.temp_size_in_bytes


def _parse(text: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
  computations, entry, current = {}, "", []
  for line in text.splitlines():
    if start := _COMPUTATION.match(line):
      current = computations.setdefault(start[1], [])
      entry = start[1] if line.startswith("ENTRY") else entry
    elif instruction := _INSTRUCTION.match(line):
      current.append((instruction[1], instruction[2]))
  return computations, entry


def _costs(
  instructions: list[tuple[str, str]], rounds: Rounds
) -> Iterator[tuple[int, list[tuple[str, Fraction | int]]]]:
  """Every instruction's own operations, and what it calls how often."""
  shapes = {
    name: [int(n) for n in shape[1].split(",") if n]
    for name, right in instructions
    if (shape := _SHAPE.match(right))
  }
  for name, right in instructions:
    operation = re.search(r"([\w-]+)\(", re.sub(r"^\(.*?\) ", "", right))
    assert operation, right
    match operation[1]:
      case "dot":
        yield _dot_flops(shapes[name], right, shapes), []
      case "while":
        yield 0, [(_one(r"body=%?([\w.-]+)", right), _rounds(right, rounds))]
      case "conditional":
        yield 0, _branches(right, rounds)
      case "custom-call":
        target = _one(r'custom_call_target="([^"]*)"', right)
        assert not re.search("dot|matmul|gemm", target.lower()), target
        yield 0, []
      case _:
        callees = re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", right)
        yield 0, [(callee, 1) for callee in callees]


def _dot_flops(
  result: list[int], right: str, shapes: dict[str, list[int]]
) -> int:
  operand = shapes[_one(r"dot\([^%)]*%([\w.-]+)", right)]
  contracted = _one(r"lhs_contracting_dims=\{([\d,]*)\}", right)
  sizes = [operand[int(axis)] for axis in contracted.split(",") if axis]
  return 2 * math.prod(result) * math.prod(sizes)


def _rounds(right: str, rounds: Rounds) -> Fraction | int:
  known = re.search(r'known_trip_count":\{"n":"(\d+)"', right)
  return int(known[1]) if known else rounds(_name(right), None)


def _branches(right: str, rounds: Rounds) -> list[tuple[str, Fraction | int]]:
  if listed := re.search(r"branch_computations=\{([^}]*)\}", right):
    branches = re.findall(r"%?([\w.-]+)", listed[1])
  else:  # Of a condition that is true or false; false is number 0.
    branches = [
      _one(rf"{value}_computation=%?([\w.-]+)", right)
      for value in ("false", "true")
    ]
  return [
    (branch, rounds(_name(right), number))
    for number, branch in enumerate(branches)
  ]


def _name(right: str) -> str:
  return _one(r'op_name="([^"]*)"', right)


def _one(pattern: str, text: str) -> str:
  found = re.search(pattern, text)
  assert found, (pattern, text)
  return found[1]
