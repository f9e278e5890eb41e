"""What a store says instead of an answer."""


class StoreUnavailableError(Exception):
  """Means that the store cannot be reached, or refuses; try again later."""


class ClosedError(StoreUnavailableError):
  """Means that there is no such place, or that it does not let a replica in.

  Somebody who enters has made a mistake, and is told so. Later on it is waited
  for like any other store that is away: somebody repairs it.
  """


class UnfitStoreError(ValueError):
  """Means that no run can be held at a place. The message is one line."""
