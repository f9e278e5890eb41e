"""Errors of a store."""


class StoreUnavailableError(Exception):
  """Means that the store cannot be reached, or refuses; try again later."""


class ClosedError(StoreUnavailableError):
  """Means that the store does not exist, or does not let this replica in.

  When a replica enters a run, this is a mistake of its user, and the replica
  stops with a message. Later on, the replica waits as for any other store that
  cannot be reached, until somebody repairs the store.
  """


class UnfitStoreError(ValueError):
  """Means that a store cannot hold a run. The message is one line."""
