"""The exchange of replicas that are programs of their own.

They share no runtime and meet in a folder or a bucket (docs/mailbox.md).
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.checks import within_limits
from dilocox_jax.codecs.base import Codec
from dilocox_jax.meeting.carrier import Carrier
from dilocox_jax.meeting.mailbox import Mailbox
from dilocox_jax.meeting.members import MailboxRules
from dilocox_jax.trees import Aggregator


def mailbox(
  where: Any,
  *,
  name: str,
  secret: bytes | str | os.PathLike[str],
  codec: Codec | str = "float32",
  step_weight: float = 1.0,
  config: Mapping[str, Any] | None = None,
  text_digest: str = "",
  rules: MailboxRules = MailboxRules(),  # noqa: B008 - it is frozen
  accept_version: bool = False,
  **settings: Any,
) -> Aggregator:
  """Averages over replicas that meet in an object store.

  It is the exchange of `dilocox_jax.make_rounds` in programs that have one
  replica each, which may be anywhere. The run is entered when the rounds are
  made.

  Wire: the arrays of the codec, behind a header of 104 bytes.

  Args:
    where: Folder or URL of the run, or an object with the methods of
      `meeting.store.Store`.
    name: Name of this replica, another one for each.
    secret: File of the secret that all replicas share, or the secret as bytes.
    codec: What is sent, as for `dilocox_jax.exchange`.
    step_weight: Weight of one inner step of this replica, e.g. its sequences.
      The weight of a message is that of the inner steps behind it.
    config: All else that the result depends on and that must be equal in all
      replicas, as nested mappings of JSON, e.g. the inner learning rate.
    text_digest: Digest of the training text.
    rules: The rules of the exchange.
    accept_version: Whether this replica may have other code than the run.
    **settings: `feedback`, `against`, `keep_unsent` and `seed`, as for
      `dilocox_jax.exchange`. A message that came too late was not sent.

  Raises:
    ValueError: One line that names what does not fit.
  """
  within_limits("step_weight", step_weight, above=0)
  defaults = dict(feedback=0.0, against="own", keep_unsent=False, seed=0)
  settings = defaults | settings

  open_mailbox = functools.partial(
    Mailbox,
    where,
    name=name,
    secret=secret,
    text_digest=text_digest,
    rules=rules,
    accept_version=accept_version,
  )
  terms = {**(config or {}), "exchange": {"codec": str(codec), **settings}}
  aggregator = exchange(codec, is_carried=True, **settings)  # pyright: ignore
  keeps = bool(settings["feedback"] or settings["keep_unsent"])
  carrier = Carrier(
    open_mailbox=open_mailbox,
    terms=terms,
    step_weight=step_weight,
    keeps=keeps,
    grace_s=rules.grace_s,
  )
  return aggregator._replace(carrier=carrier)
