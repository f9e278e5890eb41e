"""Estimates what a mailbox in a bucket costs a month.

The prices are the list prices of Amazon S3 Standard in the region us-east-1
(recalled, 2026). Uploads and deletions are free there. Other providers
have other prices, and some charge nothing for downloads.
"""

from collections.abc import Mapping

USD_PER_GB_MONTH = 0.023
USD_PER_WRITE = 0.005 / 1000  # A put or a listing.
USD_PER_READ = 0.0004 / 1000
USD_PER_GB_DOWN = 0.09  # To the internet; to machines of the region it is free.
_MONTH_S = 30 * 86_400.0


def num_requests(usage: Mapping[str, int]) -> int:
  """Returns the number of all requests.

  Args:
    usage: Requests by kind, and bytes up and down (`Mailbox.usage`).
  """
  return sum(number for kind, number in usage.items() if "bytes" not in kind)


def traffic_usd(usage: Mapping[str, int], seconds: float) -> float:
  """Returns what the requests and downloads of a replica cost a month (USD).

  Args:
    usage: Requests by kind, and "bytes_down" (`Mailbox.usage`).
    seconds: Time in which they were made.
  """
  num_writes = usage.get("put", 0) + usage.get("list", 0)
  cost = USD_PER_WRITE * num_writes
  cost += USD_PER_READ * usage.get("get", 0)
  cost += USD_PER_GB_DOWN * usage.get("bytes_down", 0) / 1e9
  return cost * _MONTH_S / max(seconds, 1.0)


def storage_usd(num_bytes: float) -> float:
  """Returns what the objects of a store cost a month (USD).

  Args:
    num_bytes: Bytes of all objects.
  """
  return USD_PER_GB_MONTH * num_bytes / 1e9
