"""One replica of a run whose replicas are programs that meet in a store.

The trainer goes through the same plan as ever, with one replica. What differs
stands here: the exchange that a mailbox carries (docs/mailbox.md), how a
newcomer finds its place in the plan, and how one that was away passes over what
the others have settled without it.
"""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.checks import flat, require
from dilocox_jax.config import RunConfig, may_differ, to_plan
from dilocox_jax.mailbox_protocol.agreement import ReplicaStaleError
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.metrics.lines import JsonLines
from dilocox_jax.metrics.recorder import MAILBOX_LOG
from dilocox_jax.plan.collectives import AUTO, MAILBOX
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.rounds.exchanges import MailboxExchange, mailbox
from dilocox_jax.rounds.late_joiner import join, skip_windows
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training.checkpoint import RefusedError
from dilocox_jax.training.parts import Parts
from dilocox_jax.trees import Tree


@dataclasses.dataclass(frozen=True)
class MailboxAddress:
  """Where a replica meets the others of its run, and as whom.

  Attributes:
    where: Folder or URL of the run, as for `dilocox_jax.mailbox`.
    name: Name of this replica, another one for each.
    secret: File of the secret that all replicas share, or the secret as bytes.
    accept_version: Whether this replica may have other code than the run.
  """

  where: Any
  name: str
  secret: bytes | str | os.PathLike[str]
  accept_version: bool = False


def mailbox_config(
  config: RunConfig, address: MailboxAddress | None, parts: Parts
) -> RunConfig:
  """Returns the config of a run whose replicas meet in a store.

  Args:
    config: Config as it is given.
    address: Where they meet.
    parts: Parts that are handed in.

  Raises:
    ValueError: If these do not go together.
  """
  require(
    address is not None,
    f"exchange.collective={MAILBOX!r} needs a place where replicas meet: give "
    "--mailbox, or mailbox= of dilocox_jax.train",
  )
  require(
    parts.exchange is None,
    "an exchange that is handed in does not go with replicas that meet in a "
    "store: drop it",
  )
  collective = config.exchange.collective
  require(
    collective in (AUTO, MAILBOX),
    f"exchange.collective={collective} needs replicas in one runtime: those "
    "that meet in a store can only average all messages, so leave it out",
  )
  exchange = dataclasses.replace(config.exchange, collective=MAILBOX)
  return dataclasses.replace(config, exchange=exchange)


def mailbox_exchange(
  config: RunConfig,
  address: MailboxAddress | None = None,
  text_digest: str = "",
) -> MailboxExchange:
  """Returns the exchange of a run whose replicas meet.

  Args:
    config: Config of the run.
    address: Where they meet; None only to read what such a run has saved.
    text_digest: Digest of the training text.
  """
  settings = config.exchange
  usual_ratio = MailboxRules.max_norm_ratio
  if address is None:
    address = MailboxAddress(None, name="", secret=b"")
  return mailbox(
    address.where,
    name=address.name,
    secret=address.secret,
    accept_version=address.accept_version,
    codec=to_plan.codec(config),
    step_weight=float(config.tokens_per_replica_step),
    text_digest=text_digest,
    rules=MailboxRules(
      config.mesh.num_replicas,
      max_norm_ratio=settings.max_norm_ratio or usual_ratio,
      quorum=config.mailbox.quorum,
      grace_s=config.mailbox.grace_s,
      snapshot_every=config.mailbox.snapshot_every,
      full_weight_ratio=config.mailbox.full_weight_ratio,
    ),
    feedback=settings.feedback,
    against=settings.against,
    keep_unsent=settings.keep_unsent,
    seed=config.seed,
  )


class MailboxReplica:
  """The replica of this program, whose others are programs of their own.

  Attributes:
    config: Config of the run.
    name: Name of the replica.
  """

  def __init__(self, config: RunConfig, address: MailboxAddress):
    """Enters nothing yet.

    Args:
      config: Config of the run (`mailbox_config`).
      address: Where the replicas meet.
    """
    self.config = config
    self.name = address.name
    self._address = address
    self._present: list[str] = []
    self._requests = 0

  def with_exchange(self, parts: Parts, text_digest: str) -> Parts:
    """Returns the parts of a run whose exchange is that of the mailbox.

    Args:
      parts: Parts that are handed in.
      text_digest: Digest of the training text.
    """
    exchange = mailbox_exchange(self.config, self._address, text_digest)
    self._client = exchange.client
    return dataclasses.replace(parts, exchange=exchange)

  def attach(
    self, rounds: Rounds, params: Tree, optimizer: Tree, batch: Tree
  ) -> None:
    """Is told the rounds that the run goes through.

    Args:
      rounds: Rounds with the exchange of `with_exchange`.
      params: Shapes and types of the parameters.
      optimizer: Shapes and types of the inner optimizer's state.
      batch: Shapes and types of a batch of one inner step, leaves [B, ...].

    Raises:
      ValueError: One line, if the code of a step needs an axis of replicas,
        which are apart here (`rounds.alone`).
    """
    rounds.check_alone(params, optimizer, batch)
    self._rounds = rounds

  def request_stop(self) -> None:
    """Has whatever waits for the store give up after the grace time."""
    self._client.stop.set()

  def enter(self, values: Mapping[str, Any], handed_in: Sequence[str]) -> None:
    """Enters the run.

    Args:
      values: Config of the run, with its sections.
      handed_in: Names of the parts that the caller handed in.

    Raises:
      RefusedError: If this replica must not take part, or if its name, its
        secret or the place is wrong.
    """
    free = may_differ()
    terms = {k: value for k, value in flat(values).items() if k not in free}
    try:
      self._client.enter(terms | {"handed_in": sorted(handed_in)})
    except ValueError as error:  # Each says in one line what is wrong.
      raise RefusedError(str(error)) from error

  def open(self, workdir: pathlib.Path, resume_step: int | None) -> None:
    """Opens the file that says who was there.

    Args:
      workdir: The run directory.
      resume_step: Inner step of the restored checkpoint, if there is one.
    """
    last_step = -1 if resume_step is None else resume_step
    self._rows = JsonLines(workdir / MAILBOX_LOG, last_step)

  @property
  def numbers(self) -> Sequence[int]:
    """Which of the M replicas of the plan this one is, by its seat."""
    mailbox = self._client.mailbox
    return [mailbox.seat % mailbox.rules.replicas]

  @property
  def is_behind(self) -> bool:
    """Whether the others have settled the next event without this replica."""
    return not self._client.announce(self._client.event)

  def joined(self, state: RoundState, total_steps: int) -> RoundState:
    """Returns the state with which this replica takes part as a newcomer.

    Args:
      state: The first state of the run.
      total_steps: Inner steps of the run.
    """
    self._client.writes_snapshots = True
    while True:
      try:
        return join(self._rounds, state, total_steps)
      except ReplicaStaleError as lost:  # The others were faster.
        logging.getLogger(__name__).info("beginning again: %s", lost)

  def passed_over(self, state: RoundState, segment: Segment) -> RoundState:
    """Returns the state after a segment in which this replica was away."""
    state = skip_windows(
      self._rounds, state, segment.windows, segment.num_steps
    )
    self.record(segment.stop)
    return state

  def end(self) -> None:
    """Says that the flush begins, in which nobody can join any more."""
    self._client.writes_snapshots = False

  def get_state(self) -> dict[str, Any]:
    """Returns what a checkpoint needs, as values of JSON."""
    return self._client.get_state()

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on where a checkpoint was saved.

    Raises:
      RefusedError: If the checkpoint is of another run than the store.
    """
    try:
      self._client.set_state(state)
    except ValueError as error:
      raise RefusedError(str(error)) from error

  def record(self, step: int) -> str:
    """Records the events since the last call.

    Args:
      step: Inner steps finished.

    Returns:
      How many replicas were in the last event, and the requests of an event,
      for the progress line.
    """
    events = self._client.settled
    self._client.settled = []
    usage = self._client.mailbox.usage
    for event in events:
      self._rows.append({"step": step, "usage": usage, **event})
      self._say_changes(event["event"], event["members"])
    requests = sum(n for kind, n in usage.items() if "bytes" not in kind)
    per_event = (requests - self._requests) / max(len(events), 1)
    self._requests = requests
    expected = self._client.mailbox.rules.replicas
    return (
      f"{len(self._present)} of {expected} here, "
      f"{per_event:.0f} requests an event"
    )

  def _say_changes(self, event: int, members: list[str]) -> None:
    if sorted(members) != self._present:
      names = ", ".join(members) or "nobody"
      logging.getLogger(__name__).info("event %d has %s", event, names)
      self._present = sorted(members)
