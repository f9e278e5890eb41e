"""Names of the collectives that average the messages of an exchange.

A config chooses a collective by its name. The classes of collectives need JAX.
So this module only says where to import each class from, and the class is
loaded when it is used (`aggregators.collective`).
"""

from dilocox_jax.plan.choices import Lazy, Registry

AUTO = "auto"  # The collective that sends the fewest bytes.
# Replicas without a common runtime exchange through a store. Each replica
# writes its message once, and reads the messages of the others.
MAILBOX = "mailbox"
PAIRS = "pairs"  # Each replica exchanges with one other replica at a time.

_FOLDER = "dilocox_jax.aggregators"

COLLECTIVES: Registry[Lazy] = Registry("collective")
COLLECTIVES.update(
  {
    "all_reduce": f"{_FOLDER}.all_reduce:AllReduceMean",
    "all_gather": f"{_FOLDER}.all_gather:AllGatherMean",
    "reduce_scatter": f"{_FOLDER}.reduce_scatter:ReduceScatterMean",
    PAIRS: f"{_FOLDER}.pairs:PairMean",
    MAILBOX: f"{_FOLDER}.mailbox_mean:MailboxMean",
  }
)


def collective_names() -> tuple[str, ...]:
  """Returns the names that `exchange.collective` may have."""
  return (AUTO, *COLLECTIVES)
