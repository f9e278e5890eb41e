"""Reads what goes between slices from the text of a compiled program.

XLA has no public way to walk through one. Pairs of `send` and `recv` start a
transfer, and `recv-done` waits for it. A loop over inner steps that lies
between them hides it.
"""

import dataclasses
import math
import re

from dilocox_jax.plan.operations import operation
from dilocox_jax.rounds.window import INNER_STEPS

_INSTRUCTION = re.compile(
  r"%?([\w.-]+) = \(?([a-z]+)(\d*)\[([\d,]*)\].*? "
  r"(send|recv|recv-done|while)\(%?([\w.-]*)"
)
_CHANNEL = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_KINDS = ("all_reduce", "all_gather", "all_to_all")  # Others are permutes.


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A transfer between slices.

  Attributes:
    kind: "all_reduce", "all_gather", "all_to_all" or "permute".
    operand_bytes: Size of what one device hands over (bytes).
    loops: Numbers of the lines with loops over inner steps that hide it.
  """

  kind: str
  operand_bytes: int
  loops: tuple[int, ...]

  def sent_bytes(self, num_replicas: int) -> float:
    """Returns what one device sends to the slices of all other replicas."""
    # An operand of a permute is what goes to one other slice.
    return operation(self.kind, self.operand_bytes).sent_bytes(num_replicas)


def transfers(text: str) -> list[Transfer]:
  """Returns the transfers between slices in the order in which they end.

  Args:
    text: A scheduled program, as `compiled.as_text()` has it.
  """
  found, loops = [], []
  sent: dict[str, tuple[str, int, int]] = {}  # By the name of the channel.
  received: dict[str, str] = {}  # Channels by the name of the instruction.
  for number, line in enumerate(text.splitlines()):
    if not (match := _INSTRUCTION.search(line)):
      continue
    name, _, bits, sizes, opcode, operand = match.groups()
    channel, kind = _CHANNEL.search(line), _KIND.search(line)
    if opcode == "while" and f'/{INNER_STEPS}/while"' in line:
      loops.append(number)
    elif opcode == "send" and channel and kind:
      values = math.prod(int(n) for n in sizes.split(",") if n)
      known = kind[1].lower() if kind[1].lower() in _KINDS else "permute"
      sent[channel[1]] = known, values * int(bits or 8) // 8, number
    elif opcode == "recv" and channel:
      received[name] = channel[1]
    elif opcode == "recv-done" and received.get(operand) in sent:
      known, size, start = sent.pop(received[operand])
      between = tuple(loop for loop in loops if loop > start)
      found.append(Transfer(known, size, between))
  return found
