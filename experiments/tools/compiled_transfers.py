"""Finds the transfers between slices in the text of a compiled program.

A slice is a group of TPUs with fast links among them. In the text, a pair of
`send` and `recv` starts a transfer, and `recv-done` waits for the result. A
loop over inner steps between the start and the wait hides the transfer. (XLA
has no public way to walk through the instructions.)
"""

import dataclasses
import math
import re
from typing import NamedTuple

from dilocox_jax.plan.operations import operation
from dilocox_jax.rounds.window import INNER_STEPS

# Name, element type, its bits, sizes, operation and operand of an instruction.
_INSTRUCTION = re.compile(
  r"%?([\w.-]+) = \(?([a-z]+)(\d*)\[([\d,]*)\].*? "
  r"(send|recv|recv-done|while)\(%?([\w.-]*)"
)
_CHANNEL = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# All transfers of other kinds are permutes.
_KINDS = ("all_reduce", "all_gather", "all_to_all")


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A transfer between slices (groups of TPUs with fast links among them).

  Attributes:
    kind: "all_reduce", "all_gather", "all_to_all" or "permute".
    operand_bytes: Size of the operand on one device (bytes).
    loops: Line numbers of the loops over inner steps that run during the
      transfer; empty: nothing hides it.
  """

  kind: str
  operand_bytes: int
  loops: tuple[int, ...]

  def sent_bytes(self, num_replicas: int) -> float:
    """Returns the bytes that one device sends to slices of other replicas."""
    # The operand of a permute goes to one other slice.
    return operation(self.kind, self.operand_bytes).sent_bytes(num_replicas)


class _Send(NamedTuple):
  """The start of a transfer (fields as in `Transfer`).

  `line_number` is the line of the transfer's `send` in the text.
  """

  kind: str
  operand_bytes: int
  line_number: int


def transfers(text: str) -> list[Transfer]:
  """Returns the transfers between slices of TPUs, in the order of their ends.

  Args:
    text: A scheduled program, as `compiled.as_text()` has it.
  """
  ended: list[Transfer] = []
  loops: list[int] = []
  sends: dict[str, _Send] = {}  # By the name of the channel.
  channels: dict[str, str] = {}  # By the name of the `recv` instruction.
  for number, line in enumerate(text.splitlines()):
    match = _INSTRUCTION.search(line)
    if not match:
      continue
    name, _, bits, sizes, opcode, operand = match.groups()
    channel = _CHANNEL.search(line)
    kind = _KIND.search(line)
    if opcode == "while" and f'/{INNER_STEPS}/while"' in line:
      loops.append(number)
    elif opcode == "send" and channel and kind:
      # A type without a number of bits is `pred`, with a byte for each value.
      num_values = math.prod(int(n) for n in sizes.split(",") if n)
      sends[channel[1]] = _Send(
        kind=kind[1].lower() if kind[1].lower() in _KINDS else "permute",
        operand_bytes=num_values * int(bits or 8) // 8,
        line_number=number,
      )
    elif opcode == "recv" and channel:
      channels[name] = channel[1]
    elif opcode == "recv-done" and channels.get(operand) in sends:
      send = sends.pop(channels[operand])
      between = tuple(loop for loop in loops if loop > send.line_number)
      ended.append(Transfer(send.kind, send.operand_bytes, between))
  return ended
