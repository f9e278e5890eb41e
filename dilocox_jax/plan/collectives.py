"""Names of the collectives that average the messages of an exchange.

A config chooses a collective by its name. This module needs no JAX, because it
has only the import paths of the classes.
"""

from dilocox_jax.plan.choices import Lazy, Registry

# Stands for all_reduce, all_gather or reduce_scatter: the collective that can
# carry the codec's messages with the fewest bytes.
AUTO = "auto"
# Replicas that are started separately exchange through a mailbox: a folder or a
# bucket. Each replica writes its message once, and reads those of the others.
MAILBOX = "mailbox"
# Whether the replicas of a mailbox divide the work of averaging: each of them
# computes one *share* of the mean, and the others read it
# (`mailbox_protocol.shares`).
MAILBOX_SHARES = ("auto", "on", "off")
# Least number of replicas for shares, with "auto" and with "on". With three
# replicas, each one reads 4/3 of a message instead of 2, but sends more.
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
  """Returns into how many slices each message in a mailbox is cut.

  A mailbox is a shared folder or bucket. If messages are cut, replica i
  averages slice i of all messages, and the other replicas read this part of the
  mean.

  Args:
    shares: "on": cut if there are at least 2 replicas. "auto": cut if there are
      at least 4, and `is_coarse` is False. "off": do not cut.
    num_replicas: Number of replicas that are expected to send a message.
    is_coarse: Whether the codec is so lossy that encoding the mean, too, would
      raise the training loss (`RowCodec.is_coarse`).

  Returns:
    `num_replicas` if messages are cut, and 0 otherwise.
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
