"""Names of the collectives that average the messages of an exchange.

A config chooses one by its name. The classes themselves need JAX, so they are
named by their place and loaded when they are used (`aggregators.collective`).
"""

from dilocox_jax.plan.choices import Lazy, Registry

AUTO = "auto"  # The collective that sends the fewest bytes.
# Replicas that are programs of their own exchange through a store: each writes
# its message once, and reads those of the others.
MAILBOX = "mailbox"
PAIRS = "pairs"  # Each replica exchanges with one other at a time.

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
