"""Transfers between slices in a compiled program, and what hides them.

A program for several TPU slices moves data between them with pairs of send and
receive: `send`, `recv` start them, and `send-done`, `recv-done` wait for them.
A compiled program is scheduled, so the order of its text is the order in which
it runs. A transfer is hidden by a loop over inner steps that lies between its
`send` and its `recv-done`.
"""

import dataclasses
import math

from dilocox_jax.outer.window import INNER_STEPS
from dilocox_jax.plan.collective import Collective
from experiments.compilation.hlo import Instruction, Module

_TRANSFER = r'_xla_megascale_transfer_type="(\w+)"'
_KINDS = {
  "ALL_REDUCE": "all_reduce",
  "ALL_GATHER": "all_gather",
  "ALL_TO_ALL": "all_to_all",
}


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A transfer between slices.

  Attributes:
    name: Name of its `send`.
    kind: "all_reduce", "all_gather", "all_to_all" or "permute".
    operand_bytes: Size of what one device hands over (bytes).
    computation: Name of the computation that it stands in.
    start: Number of its `send` in that computation, from 0.
    end: Number of its `recv-done`.
    hidden_by: Numbers of the loops over inner steps in between.
  """

  name: str
  kind: str
  operand_bytes: int
  computation: str
  start: int
  end: int
  hidden_by: tuple[int, ...]


def transfers(module: Module) -> list[Transfer]:
  """Returns the transfers between slices, by computation and start."""
  found = []
  for name, instructions in module.computations.items():
    loops = [n for n, i in enumerate(instructions) if is_inner_loop(i)]
    ends = _ends(instructions)
    for start, instruction in enumerate(instructions):
      kind = transfer_kind(instruction)
      if kind is None:
        continue
      end = ends[_channel(instruction)]
      size = module.operand_bytes(instruction)
      between = tuple(n for n in loops if start < n < end)
      found.append(
        Transfer(instruction.name, kind, size, name, start, end, between)
      )
  return found


def transfer_kind(instruction: Instruction) -> str | None:
  """Returns the kind of a transfer between slices that starts here."""
  kind = instruction.attribute(_TRANSFER)
  if instruction.opcode != "send" or kind is None:
    return None
  return _KINDS.get(kind, "permute")


def sent_bytes(module: Module, num_replicas: int = 2) -> float:
  """Returns the bytes that one device sends to other slices.

  Args:
    module: The program. No loop of it sends anything.
    num_replicas: Number of replicas, each on slices of its own.
  """
  # An operand of a permute is what goes to one other slice.
  return math.fsum(
    Collective(each.kind, each.operand_bytes).sent_bytes(num_replicas)
    for each in transfers(module)
  )


def is_inner_loop(instruction: Instruction) -> bool:
  """Whether an instruction is a loop over inner steps."""
  place = instruction.op_name.split("/")[-2:]
  return instruction.opcode == "while" and place == [INNER_STEPS, "while"]


def _ends(instructions: tuple[Instruction, ...]) -> dict[str, int]:
  """Returns the number of the `recv-done` of every transfer."""
  received = {
    each.name: _channel(each) for each in instructions if each.opcode == "recv"
  }
  return {
    received[each.operands[0]]: number
    for number, each in enumerate(instructions)
    if each.opcode == "recv-done" and each.operands[0] in received
  }


def _channel(instruction: Instruction) -> str:
  """Returns the name that a send and its receive have in common."""
  pattern = r'_xla_host_transfer_rendezvous="([^"]*)"'
  return instruction.attribute(pattern) or ""
