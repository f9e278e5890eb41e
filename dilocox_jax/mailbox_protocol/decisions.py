"""What replicas decide once, kept in two objects.

All replicas follow a decision, for example the list of messages of an event.
Whoever may write in the store can delete or damage the object that holds it,
also after some replicas have followed it. The other replicas must then not
decide anew. So a replica decides in two steps:

1. It creates the *proposal*. Of several replicas exactly one succeeds.
2. It creates the *decision* with the content of the proposal.

Replicas follow the decision alone. If one of the two objects is lost, the other
one still has the content:

    lost: the decision    The next replica cannot create the proposal, because
                          it is there, and writes the decision again from it.
    lost: the proposal    A replica that has not seen the decision may create
                          another proposal. It cannot create the decision,
                          because that is there, and follows it.
"""

from collections.abc import Callable
from typing import Any

from dilocox_jax.mailbox_protocol.signer import JSON_BYTES, Signer

# An object that exists and cannot be read yet is asked for so many times. The
# pauses double, so these are 13 s: longer than the caches of network folders.
_TRIES = 8
_FIRST_PAUSE_S = 0.05


class Decisions:
  """The decisions of one run."""

  def __init__(self, store: Any, signer: Signer):
    """Reads and writes nothing yet.

    Args:
      store: A `RetryingStore` store.
      signer: The signer of the run.
    """
    self._store = store
    self._signer = signer

  def read(self, path: str) -> dict[str, Any] | None:
    """Returns what an object says; None if it is missing or damaged."""
    return self._signer.verify_json(path, self._store.get(path, JSON_BYTES))

  def decide(
    self,
    path: str,
    proposal: str,
    value: dict[str, Any],
    check: Callable[[], None],
  ) -> dict[str, Any]:
    """Decides, and returns what all replicas have decided.

    Args:
      path: Path of the decision.
      proposal: Path of its proposal.
      value: What this replica proposes, as JSON.
      check: Is called between the two steps, and raises an error if there must
        be no decision any more.
    """
    proposed = self._create(proposal, value)
    check()
    return self._create(path, proposed)

  def complete(
    self, path: str, proposal: str, check: Callable[[], None]
  ) -> dict[str, Any] | None:
    """Decides what was proposed; returns None if there is no proposal."""
    proposed = self.read(proposal)
    if proposed is None:
      return None
    check()
    return self._create(path, proposed)

  def _create(self, path: str, value: dict[str, Any]) -> dict[str, Any]:
    """Creates an object unless it is there; returns what it says then."""
    data = self._signer.sign_json(path, value)
    wait = _FIRST_PAUSE_S
    for _ in range(_TRIES):
      if self._store.create(path, data):
        return value
      found = self._store.get(path, JSON_BYTES)
      content = self._signer.verify_json(path, found)
      if content is not None:
        return content
      if found is not None:
        break  # A stranger wrote it, or it was damaged.
      # It was deleted meanwhile, or it cannot be read yet.
      self._store.pause(wait)
      wait = 2 * wait
    self._store.put(path, data)
    return value
