"""Names of the collectives that average the messages of an exchange.

A config chooses a collective by its name. The classes of collectives need JAX.
So this module, which is loaded without JAX, only says where to import each
class from. `aggregators.collective` imports the class when it is used.
"""

from dilocox_jax.plan.choices import Lazy, Registry

# Stands for all_reduce, all_gather or reduce_scatter: the collective that can
# carry the codec's messages with the fewest bytes.
AUTO = "auto"
# Replicas without a common runtime exchange through a store. Each replica
# writes its message once, and reads the messages of the others.
MAILBOX = "mailbox"
# When the mean of such replicas is made in shares (`mailbox_protocol.shares`).
MAILBOX_SHARES = ("auto", "on", "off")
# Least number of replicas for that, with "auto" and with "on". With three
# replicas, one reads 4/3 of a message in shares instead of 2, and sends more.
LEAST_AUTO_SHARES = 4
LEAST_SHARES = 2
PAIRS = "pairs"  # Each replica exchanges with one other replica at a time.

_PACKAGE = "dilocox_jax.aggregators"

# The class of each collective, as "module:class".
COLLECTIVES: Registry[Lazy] = Registry("collective")
COLLECTIVES.update(
  {
    "all_reduce": f"{_PACKAGE}.all_reduce:AllReduceMean",
    "all_gather": f"{_PACKAGE}.all_gather:AllGatherMean",
    "reduce_scatter": f"{_PACKAGE}.reduce_scatter:ReduceScatterMean",
    PAIRS: f"{_PACKAGE}.pairs:PairMean",
    MAILBOX: f"{_PACKAGE}.mailbox_mean:MailboxMean",
  }
)


def num_slices(shares: str, num_replicas: int, is_coarse: bool) -> int:
  """Returns into how many slices the messages of a mailbox are cut.

  If messages are cut, each replica computes one share of the mean
  (`reference.shares`).

  Args:
    shares: "on", "off" or "auto" (`MAILBOX_SHARES`).
    num_replicas: Number of replicas that are expected.
    is_coarse: Whether the codec loses so much that rounding the mean once more
      costs a higher loss (`RowCodec.is_coarse`). Then "auto" cuts nothing.

  Returns:
    The number of replicas. 0 if messages are not cut.
  """
  if shares == "off":
    return 0
  if shares == "auto" and is_coarse:
    return 0
  least = LEAST_SHARES if shares == "on" else LEAST_AUTO_SHARES
  return num_replicas if num_replicas >= least else 0


def collective_names() -> tuple[str, ...]:
  """Returns the values that the config field `exchange.collective` may have."""
  return (AUTO, *COLLECTIVES)
