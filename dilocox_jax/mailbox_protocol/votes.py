"""Which shared state counts, if those of the senders differ.

The messages of a turn are averaged if their senders have the state that most
senders have. The others take the newest snapshot.

If another state is as frequent, nobody knows which one is wrong, e.g. if two
replicas differ. Then the states are *split*: no message counts, and all senders
take the newest snapshot, which heals whoever was wrong. A device that computes
wrong results would split the states again. So at a second time before the next
snapshot the state of the earliest seat counts, and the run goes on with it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from dilocox_jax.mailbox_protocol.messages import Message


class Vote(NamedTuple):
  """Which messages do not count because of their senders' states.

  Attributes:
    left_out: The reason why a message does not count, by replica.
    is_split: Whether no state is more frequent than all others.
  """

  left_out: dict[str, str]
  is_split: bool = False


def vote(
  sent: Mapping[str, Message],
  *,
  before: str,
  event: int,
  num_kinds: int = 1,
  breaks_ties: bool = False,
) -> Vote:
  """Returns which messages belong to another state than most of them.

  Args:
    sent: The messages by replica, in the order of seats.
    before: Digest of the manifest before this one, the name of the state.
    event: Number of the event.
    num_kinds: Number of fragments, of which an event changes one.
    breaks_ties: Whether the state of the earliest seat counts if another one is
      as frequent.
  """
  left_out = {}
  comparable = {}
  for name, message in sent.items():
    if message.state.name == before:
      comparable[name] = message
    else:
      left_out[name] = "it follows other lists of messages"
  if not comparable:
    return Vote(left_out)

  def differences_from(name: str) -> dict[str, str]:
    state = comparable[name].state
    texts = {
      other: state.difference_from(message.state, event, num_kinds)
      for other, message in comparable.items()
    }
    return {other: text for other, text in texts.items() if text}

  first = next(iter(comparable))
  differing = {first: differences_from(first)}
  if differing[first]:
    differing |= {name: differences_from(name) for name in comparable}
  # Of several replicas with the same number of others that differ from them,
  # `min` returns the one with the earliest seat.
  chosen = min(differing, key=lambda name: len(differing[name]))
  rivals = [
    name
    for name in differing[chosen]
    if len(differing[name]) == len(differing[chosen])
  ]
  is_split = bool(rivals) and not breaks_ties
  for name, text in differing[chosen].items():
    left_out[name] = f"its shared state differs: {text}"
  if is_split:
    for name in comparable:
      left_out.setdefault(
        name, "its shared state differs from others that are as frequent"
      )
  return Vote(left_out, is_split)
