"""Errors of an object store, which `mailbox_protocol.store` handles."""


class StoreUnavailableError(Exception):
  """The store cannot be reached, or refuses a request.

  A later try may succeed, so a replica that is in a run waits and tries again.
  """


class ClosedError(StoreUnavailableError):
  """The store does not exist, or does not let this replica in.

  When a replica enters a run, this is a mistake of its user, and the replica
  stops with a message. Later on, the replica waits as for any other store that
  cannot be reached, until somebody repairs the store.
  """


class UnfitStoreError(ValueError):
  """A store cannot hold a run, whatever the replica waits for.

  For example, the store is missing when the replica enters, or overwrites
  objects that it should not. The message is one line.
  """


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's message.

  The other lines of a message of `obstore` name the source of the error.
  """
  return str(error).strip().split("\n")[0] or type(error).__name__
