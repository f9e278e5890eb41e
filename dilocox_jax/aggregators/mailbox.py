"""The exchange of replicas that are programs of their own.

They share no runtime and meet in a folder or a bucket (docs/mailbox.md).
"""

import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from dilocox_jax.aggregators.feedback import Residual, carried_exchange
from dilocox_jax.checks import within_limits
from dilocox_jax.codecs.base import Codec
from dilocox_jax.meeting.carrier import Carrier
from dilocox_jax.meeting.mailbox import Mailbox
from dilocox_jax.meeting.rules import MailboxRules
from dilocox_jax.trees import Aggregator


def mailbox(
  where: Any,
  *,
  name: str,
  secret: bytes | str | os.PathLike[str],
  codec: Codec | str = "float32",
  feedback: float = 0.0,
  against: str = "own",
  residual_dtype: str = "float32",
  keep_unsent: bool = False,
  seed: int = 0,
  weight: float = 1.0,
  config: Mapping[str, Any] | None = None,
  text_digest: str = "",
  rules: MailboxRules = MailboxRules(),  # noqa: B008 - it is frozen
  accept_version: bool = False,
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
    codec: What is sent, as for `dilocox_jax.exchange`; so are the next five.
    feedback: Share of what was not sent that is added to the next exchange. A
      message that came too late was not sent.
    against: What the residual is measured against.
    residual_dtype: Type of the residual.
    keep_unsent: Whether what was not sent stays in the replica's parameters.
    seed: Seed of random masks and first factors, equal in all replicas.
    weight: Weight of this replica in the mean, e.g. its tokens in a round.
    config: All else that the result depends on and that must be equal in all
      replicas, as nested mappings of JSON, e.g. the inner learning rate.
    text_digest: Digest of the training text.
    rules: The rules of the exchange.
    accept_version: Whether this replica may have other code than the run.

  Raises:
    ValueError: One line that names what does not fit.
  """
  within_limits("weight", weight, above=0)
  exchange = {
    "codec": str(codec),
    "feedback": feedback,
    "against": against,
    "residual_dtype": residual_dtype,
    "keep_unsent": keep_unsent,
    "seed": seed,
  }

  def enter(terms: Mapping[str, Any]) -> Mailbox:
    return Mailbox(
      where,
      name=name,
      secret=secret,
      config={**(config or {}), "exchange": exchange, **terms},
      text_digest=text_digest,
      rules=rules,
      accept_version=accept_version,
    )

  residual = Residual(feedback, against, residual_dtype)
  return carried_by(enter, name, codec, residual, keep_unsent, seed, weight)


def carried_by(
  enter: Callable[[Mapping[str, Any]], Mailbox],
  name: str,
  codec: Codec | str,
  residual: Residual,
  keep_unsent: bool,
  seed: int,
  weight: float,
) -> Aggregator:
  """Returns an exchange whose messages a mailbox carries.

  Args:
    enter: Function from what must be equal in all replicas to the mailbox.
    name: Name of this replica; its random numbers follow from it.
    codec: What is sent.
    residual: What is kept of what the codec lost.
    keep_unsent: Whether what was not sent stays in the parameters.
    seed: Seed that all replicas share.
    weight: Weight of this replica in the mean.
  """
  aggregator = carried_exchange(
    codec,
    residual,
    number=zlib.crc32(name.encode()),
    keep_unsent=keep_unsent,
    seed=seed,
  )
  keeps = bool(residual.decay) or keep_unsent
  carrier = Carrier(enter, weight=weight, keeps=keeps)
  return aggregator._replace(
    average=_Refusing(aggregator.average), stretch_ends=None, carrier=carrier
  )


class _Refusing:
  """Has the turns of a function that the host carries, and no call."""

  def __init__(self, average: Any):
    self.pausing = average.pausing

  def __call__(self, *arguments: Any) -> NoReturn:
    raise ValueError(
      "dilocox_jax.mailbox exchanges outside of compiled programs: give it to"
      " dilocox_jax.make_rounds"
    )
