"""Estimates what a mailbox in a bucket costs, in US dollars a month.

A month has 30 days. The prices are the list prices of Amazon S3 Standard in the
region us-east-1 (recalled, 2026). Uploaded bytes and deletions are free there.
"""

from collections.abc import Mapping

USD_PER_GB_MONTH = 0.023
USD_PER_WRITE = 0.005 / 1000  # A put or a listing.
USD_PER_READ = 0.0004 / 1000  # A get.
# Bytes that are read over the internet. In the bucket's region they are free.
USD_PER_GB_DOWN = 0.09
_MONTH_S = 30 * 86_400.0


def num_requests(usage: Mapping[str, int]) -> int:
  """Returns the total number of requests to a store.

  `usage` is a value of `Mailbox.usage`; its byte counts are ignored.
  """
  return sum(number for kind, number in usage.items() if "bytes" not in kind)


def traffic_usd(usage: Mapping[str, int], seconds: float) -> float:
  """Returns the costs of a replica's requests and downloads (USD a month).

  Args:
    usage: Requests by kind, and "bytes_down", as `Mailbox.usage` returns them.
    seconds: Time in which the replica made them. Less than 1 s counts as 1 s.
  """
  num_writes = usage.get("put", 0) + usage.get("list", 0)
  cost = USD_PER_WRITE * num_writes
  cost += USD_PER_READ * usage.get("get", 0)
  cost += USD_PER_GB_DOWN * usage.get("bytes_down", 0) / 1e9
  return cost * _MONTH_S / max(seconds, 1.0)


def storage_usd(num_bytes: float) -> float:
  """Returns the costs of keeping `num_bytes` in a store (USD a month)."""
  return USD_PER_GB_MONTH * num_bytes / 1e9
