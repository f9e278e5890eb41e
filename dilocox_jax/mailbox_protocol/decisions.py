"""Decisions that replicas take once, each kept in two objects of the store.

A decision is a value that all replicas follow, for example the list of messages
to average. An object may be lost or damaged after some replicas have followed
it. The others must then not decide differently. So a replica decides in two
steps:

1. It creates the *proposal*. If several replicas do so, exactly one succeeds.
2. It creates the *decision* with the content of the proposal.

Replicas follow only the decision. If one of the two objects is lost, the other
one still has the content:

    lost: the decision    The next replica cannot create the proposal, because
                          the proposal is there. It reads the proposal, and
                          writes the decision again.
    lost: the proposal    A replica that has not seen the decision may create
                          another proposal. It cannot create the decision,
                          because the decision is there, and follows it.
"""

import functools
from typing import Any

from dilocox_jax.mailbox_protocol.signer import JSON_BYTES, Signer

# How often a replica tries to read an object that exists and cannot be read
# yet. The pauses double, and together take 13 s. Network folders may remember
# for some seconds that an object is missing, but not as long as this.
_TRIES = 8
_FIRST_PAUSE_S = 0.05
# A replica that finds the proposal of another one waits this long before it
# reads the decision, which the other replica is about to write.
DECIDES_WITHIN_S = 0.01


class Decisions:
  """Reads and takes the decisions of one run.

  A decision is a value that all replicas follow, such as a list of messages.

  Attributes:
    has_proposed: Whether the last call of `decide` created the proposal.
  """

  def __init__(self, store: Any, signer: Signer):
    """Makes no request yet. `store` is a `RetryingStore`."""
    self._store = store
    self._signer = signer
    self.has_proposed = False

  def read(self, path: str) -> dict[str, Any] | None:
    """Returns the value of the decision or proposal at a path.

    It is a dict of values of JSON. The result is None if the object is missing
    or has no valid signature.
    """
    return self._signer.verify_json(path, self._store.get(path, JSON_BYTES))

  def decide(
    self, path: str, proposal: str, value: dict[str, Any]
  ) -> dict[str, Any]:
    """Proposes a value, and returns the value that all replicas follow.

    If another replica has proposed or decided before, its value counts.

    Args:
      path: Path of the decision.
      proposal: Path of the proposal for this decision.
      value: The value that this replica proposes, a dict of values of JSON.
    """
    self.has_proposed = self._store.create(
      proposal, self._signer.sign_json(proposal, value)
    )
    if self.has_proposed:
      return self._create(path, value)
    # Another replica has just proposed, and is about to write the decision.
    self._store.pause(DECIDES_WITHIN_S)
    decided = self.read(path)
    if decided is not None:
      return decided
    # The other replica is slow or has ended, or the decision was lost. So this
    # replica writes the decision, with the content of the proposal.
    decided, proposed = self._store.at_once(
      [
        functools.partial(self.read, path),
        functools.partial(self.read, proposal),
      ]
    )
    if decided is not None:
      return decided
    if proposed is None:  # The proposal is damaged, or was lost meanwhile.
      proposed = self._create(proposal, value)
    return self._create(path, proposed)

  def complete(self, path: str, proposal: str) -> dict[str, Any] | None:
    """Writes a lost decision again from its earlier copy, the proposal.

    Args:
      path: Path of the decision.
      proposal: Path of the proposal for this decision.

    Returns:
      The value that all replicas follow; None if there is no valid proposal.
    """
    proposed = self.read(proposal)
    if proposed is None:
      return None
    return self._create(path, proposed)

  def _create(self, path: str, value: dict[str, Any]) -> dict[str, Any]:
    """Creates a signed object, and returns the value that is then at `path`.

    A valid object at the path is kept. Any other one is replaced.
    """
    data = self._signer.sign_json(path, value)
    wait = _FIRST_PAUSE_S
    for _ in range(_TRIES):
      if self._store.create(path, data):
        return value
      stored = self._store.get(path, JSON_BYTES)
      content = self._signer.verify_json(path, stored)
      if content is not None:
        return content
      if stored is not None:
        break  # No replica wrote this object, or it was damaged.
      # The object was deleted meanwhile, or it cannot be read yet.
      self._store.pause(wait)
      wait = 2 * wait
    self._store.put(path, data)
    return value
