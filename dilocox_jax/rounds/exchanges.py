"""The exchanges that rounds accept, each with the runtime that it needs.

Replicas of one runtime share an axis, over which an aggregator averages.
Replicas that are programs of their own share no runtime: they meet in a folder
or a bucket (docs/mailbox.md).
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.aggregators.mailbox_mean import MailboxMean
from dilocox_jax.checks import require, within_limits
from dilocox_jax.codecs.base import Codec
from dilocox_jax.distributed.replicas import (
  ALONE_AXIS,
  REPLICA_AXIS,
  Replicas,
)
from dilocox_jax.mailbox_protocol.client import MailboxClient
from dilocox_jax.mailbox_protocol.mailbox import Mailbox
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.collectives import MAILBOX
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.rounds.exchange_thread import InThread
from dilocox_jax.rounds.in_program import InProgram
from dilocox_jax.rounds.mailbox_runtime import MailboxRuntime
from dilocox_jax.rounds.runtime import Runtime


@dataclasses.dataclass(frozen=True, eq=False)
class LocalExchange:
  """The exchange of replicas in one runtime.

  Attributes:
    aggregator: Averages over the axis of the replicas.
    in_thread: Whether a second thread dispatches exchanges.
    axis_name: Axis over which replicas are mapped.
  """

  aggregator: Aggregator
  in_thread: bool = False
  axis_name: str = REPLICA_AXIS

  def enter(self, method: Method, num_replicas: int) -> None:
    """Does nothing: all replicas are here."""

  def make_runtime(self, outer: OuterStep, replicas: Replicas) -> Runtime:
    """Returns what dispatches exchanges."""
    if self.in_thread:
      return InThread(outer, replicas)
    return InProgram(replicas)


@dataclasses.dataclass(frozen=True, eq=False)
class MailboxExchange:
  """The exchange of a replica whose others are programs of their own.

  Attributes:
    aggregator: Averages the messages that the mailbox brings.
    client: The mailbox, and how far the run has come.
    axis_name: Axis over which the one replica is mapped.
  """

  aggregator: Aggregator
  client: MailboxClient
  axis_name: str = ALONE_AXIS

  def enter(self, method: Method, num_replicas: int) -> None:
    """Enters the run.

    Args:
      method: Schedule and rule, which must be equal in all programs.
      num_replicas: Replicas of this program.

    Raises:
      ValueError: If there are several, or the run is another one.
    """
    require(
      num_replicas == 1,
      f"num_replicas={num_replicas} must be 1 with dilocox_jax.mailbox, in "
      "which each replica is a program of its own",
    )
    self.client.enter({"method": dataclasses.asdict(method)})

  def make_runtime(self, outer: OuterStep, replicas: Replicas) -> Runtime:
    """Returns what dispatches exchanges."""
    return MailboxRuntime(outer, replicas, self.client)


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
  feedback: float = 0.0,
  against: str = "own",
  keep_unsent: bool = False,
  seed: int = 0,
  collective: str = MAILBOX,
) -> MailboxExchange:
  """Averages over replicas that meet in an object store.

  It is the exchange of `dilocox_jax.make_rounds` in programs that have one
  replica each, which may be anywhere. The run is entered when the rounds are
  made.

  Wire: the arrays of the codec, behind a header of 104 bytes.

  Args:
    where: Folder or URL of the run, or an object with the methods of
      `mailbox_protocol.store.Store`.
    name: Name of this replica, another one for each.
    secret: File of the secret that all replicas share, or the secret as bytes.
    codec: What is sent, as for `dilocox_jax.exchange`.
    step_weight: Weight of one inner step of this replica, e.g. its sequences.
      The weight of a message is that of the inner steps behind it.
    config: All else that the result depends on and that must be equal in all
      replicas, as nested mappings of JSON, e.g. the inner learning rate.
    text_digest: Digest of the training text.
    rules: The rules of the exchange.
    feedback: Share of what the codec lost that is added to the next exchange,
      as for `dilocox_jax.exchange`. A message that came too late was not sent.
    against: What the residual is measured against, "own" or "mean".
    keep_unsent: Whether what the codec lost stays in the replica's parameters.
    seed: Seed of random masks and first low-rank factors.
    collective: "mailbox", as nothing else reaches other programs.

  Raises:
    ValueError: One line that names what does not fit.
  """
  within_limits("step_weight", step_weight, above=0)
  require(
    collective == MAILBOX,
    f"collective={collective!r} needs replicas in one runtime: those that meet "
    "in a store can only average all messages, so leave it out",
  )
  open_mailbox = functools.partial(
    Mailbox,
    where,
    name=name,
    secret=secret,
    text_digest=text_digest,
    rules=rules,
  )
  settings = {
    "codec": str(codec),
    "feedback": feedback,
    "against": against,
    "keep_unsent": keep_unsent,
    "seed": seed,
  }
  aggregator = exchange(
    codec,
    feedback=feedback,
    against=against,
    keep_unsent=keep_unsent,
    seed=seed,
    collective=MailboxMean(),
  )
  client = MailboxClient(
    open_mailbox=open_mailbox,
    terms={**(config or {}), "exchange": settings},
    step_weight=step_weight,
    keeps=bool(feedback or keep_unsent),
    grace_s=rules.grace_s,
  )
  # The steps that hide an exchange run beside the whole of it.
  return MailboxExchange(aggregator._replace(stretch_ends=None), client)
