"""The errors that requests to a store (a folder or a bucket) raise."""


class StoreUnavailableError(Exception):
  """Raised if the store cannot be reached, or refuses a request.

  The caller may try again later.
  """


class ClosedError(StoreUnavailableError):
  """Raised if the store will refuse until somebody changes it or its URL.

  For example, the store does not exist, denies access to this replica, or is a
  folder whose file system has no hard links.
  """


class UnfitStoreError(ValueError):
  """Raised if a store cannot hold a run, so that waiting would not help.

  For example, it does not exist when a replica enters the run, or it overwrites
  an object that was to be created only once. The message is one line.
  """


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's message.

  If the message is empty, the result is the name of the error's class.
  """
  return str(error).strip().split("\n")[0] or type(error).__name__
