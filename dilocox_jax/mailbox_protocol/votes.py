"""Decides whose messages count if the shared states of their senders differ.

The shared state (outer parameters, outer optimizer and the codec's common
state) should be equal in all replicas. If it is not, the messages of the
senders with the most frequent state count. The other senders must take the
newest snapshot of the shared state.

If several states tie for the most frequent one, nobody knows which is right:
they are *split*. No message counts then, and all senders take the newest
snapshot. If states tie again before the next snapshot is due, the one of them
whose first sender joined earliest wins: the messages of its senders count.
"""

from collections.abc import Mapping
from typing import NamedTuple

from dilocox_jax.mailbox_protocol.messages import Message


class Vote(NamedTuple):
  """Says which messages do not count because of their senders' shared states.

  The shared state (outer parameters, outer optimizer and the codec's common
  state) should be equal in all replicas.

  Attributes:
    left_out: For each replica whose message does not count, the reason, e.g.
      "it follows other lists of messages".
    is_split: Whether no message counts, because several states tied for the
      most frequent one.
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
  """Returns which messages do not count because of their senders' states.

  The state that most senders have counts. A message whose state has another
  name than `before` never counts.

  Args:
    sent: The messages by replica, in the order in which replicas joined.
    before: Digest of the manifest (list of averaged messages) that all senders
      must have followed last. It is the name of their states.
    event: Number of the event (exchange).
    num_kinds: Number of fragments. With `event` it sets how far equal states
      may differ by rounding.
    breaks_ties: What to do if several states tie for the most frequent one.
      True: the state whose first sender joined earliest counts. False: no
      message counts.
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

  # Usually no state differs from the first one. Then the others need not be
  # compared with each other.
  first = next(iter(comparable))
  differing = {first: differences_from(first)}
  if differing[first]:
    differing |= {name: differences_from(name) for name in comparable}
  # Choose the replica from which the fewest others differ. Example: a differs
  # from b and c, which are equal. Two others differ from a, but only one from
  # each of b and c. `min` returns the first of these two, b.
  chosen = min(differing, key=lambda name: len(differing[name]))
  # A rival has another state, with which as many replicas agree.
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
