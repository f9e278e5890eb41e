"""The errors that requests to an object store raise."""


class StoreUnavailableError(Exception):
  """Raised if the store cannot be reached, or refuses a request.

  A later try may succeed. So a replica that has entered a run waits and tries
  again (`store.RetryingStore`).
  """


class ClosedError(StoreUnavailableError):
  """Raised if the store will refuse until somebody changes it or the URL.

  For example, it does not exist, denies this replica access, or is a folder
  whose file system has no hard links.

  While a replica enters a run, this is a mistake of its user: `RetryingStore`
  raises `UnfitStoreError`. Later the replica waits and tries again, because
  somebody may repair the store.
  """


class UnfitStoreError(ValueError):
  """Raised if a store cannot hold a run, so that waiting would not help.

  For example, the store does not exist when a replica enters the run, or it
  overwrites an object that was to be created only once. The message is one
  line.
  """


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's message, or else its class's name.

  The further lines of an error of `obstore` only say from where it came.
  """
  return str(error).strip().split("\n")[0] or type(error).__name__
