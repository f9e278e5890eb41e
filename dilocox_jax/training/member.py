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

from dilocox_jax.aggregators.mailbox import mailbox
from dilocox_jax.checks import flat, require
from dilocox_jax.config import FREE_ON_RESUME, RunConfig, to_plan
from dilocox_jax.meeting.agreement import LostError
from dilocox_jax.meeting.members import MailboxRules
from dilocox_jax.metrics.lines import JsonLines
from dilocox_jax.metrics.recorder import MEETING
from dilocox_jax.outer.newcomer import joined, passed_over
from dilocox_jax.outer.round_states import RoundState
from dilocox_jax.outer.rounds import Rounds
from dilocox_jax.plan.collective import MAILBOX
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.training.checkpoint import RefusedError
from dilocox_jax.training.parts import Parts
from dilocox_jax.trees import Aggregator

# Fields that may differ between replicas, beside those that may change when a
# run is resumed. What a replica reads of the text is compared by its digest,
# and weights make up for another batch size.
_OWN = {
  *FREE_ON_RESUME,
  *(f"data.{name}" for name in ("source", "glob", "batch_size")),
  "evaluation.num_sequences",
  *("checkpoint.init_from", "inner.accumulate_steps"),
  *(f"model.{name}" for name in ("remat", "loss_chunk_tokens", "attention")),
  *("model.scan_unroll", "mesh.stacked_by"),
}


@dataclasses.dataclass(frozen=True)
class Meeting:
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


def meeting_config(
  config: RunConfig, meeting: Meeting | None, parts: Parts
) -> RunConfig:
  """Returns the config of a run whose replicas meet in a store.

  Args:
    config: Config as it is given.
    meeting: Where they meet.
    parts: Parts that are handed in.

  Raises:
    ValueError: If these do not go together.
  """
  require(
    meeting is not None,
    f"exchange.collective={MAILBOX!r} needs a place where replicas meet: give "
    "--meet, or meet= of dilocox_jax.train",
  )
  require(
    parts.exchange is None,
    "an exchange that is handed in does not go with replicas that meet in a "
    "store: drop it",
  )
  exchange = dataclasses.replace(config.exchange, collective=MAILBOX)
  return dataclasses.replace(config, exchange=exchange)


def exchange(
  config: RunConfig, meeting: Meeting | None = None, text_digest: str = ""
) -> Aggregator:
  """Returns the exchange of a run whose replicas meet.

  Args:
    config: Config of the run.
    meeting: Where they meet; None only to read what such a run has saved.
    text_digest: Digest of the training text.
  """
  settings, rules = config.exchange, MailboxRules
  met = meeting or Meeting(None, name="", secret=b"")
  return mailbox(
    **vars(met),
    codec=to_plan.codec(config),
    step_weight=float(config.tokens_per_replica_step),
    text_digest=text_digest,
    rules=rules(
      config.mesh.num_replicas,
      max_norm_ratio=settings.max_norm_ratio or rules.max_norm_ratio,
      **vars(config.meet),
    ),
    feedback=settings.feedback,
    against=settings.against,
    keep_unsent=settings.keep_unsent,
    seed=config.seed,
  )


class Member:
  """The replica of this program as a member of its run.

  Attributes:
    name: Its name.
    stop: Set once the run is to stop (`Carrier.stop`).
  """

  def __init__(self, meeting: Meeting, rounds: Rounds):
    """Enters nothing yet.

    Args:
      meeting: Where the replicas meet.
      rounds: Rounds with an `exchange` of this meeting.
    """
    self.name, self._rounds = meeting.name, rounds
    self._carrier = rounds.outer.aggregator.carrier
    self.stop = self._carrier.stop
    self._present: list[str] = []
    self._requests = 0

  def enter(self, values: Mapping[str, Any], handed_in: Sequence[str]) -> None:
    """Enters the run.

    Args:
      values: Config of the run, with its sections.
      handed_in: Names of the parts that the caller handed in.

    Raises:
      RefusedError: If this replica must not take part, or if its name, its
        secret or the place is wrong.
    """
    terms = {k: value for k, value in flat(values).items() if k not in _OWN}
    try:
      self._carrier.enter(terms | {"handed_in": sorted(handed_in)})
    except ValueError as error:  # Each says in one line what is wrong.
      raise RefusedError(str(error)) from error

  def open(self, workdir: pathlib.Path, resume_step: int | None) -> None:
    """Opens the file that says who was there.

    Args:
      workdir: The run directory.
      resume_step: Inner step of the restored checkpoint, if there is one.
    """
    last = -1 if resume_step is None else resume_step
    self._rows = JsonLines(workdir / MEETING, last)

  @property
  def number(self) -> int:
    """Which of the M replicas of the plan this one is, by its seat."""
    return self._carrier.mailbox.seat % self._carrier.mailbox.rules.replicas

  @property
  def is_behind(self) -> bool:
    """Whether the others have settled the next event without this replica."""
    return not self._carrier.announce(self._carrier.event)

  def joined(self, state: RoundState, total_steps: int) -> RoundState:
    """Returns the state with which this replica takes part as a newcomer.

    Args:
      state: The first state of the run.
      total_steps: Inner steps of the run.
    """
    self._carrier.writes_snapshots = True
    while True:
      try:
        return joined(self._rounds, state, total_steps)
      except LostError as lost:  # The others were faster.
        logging.getLogger(__name__).info("beginning again: %s", lost)

  def passed_over(self, state: RoundState, segment: Segment) -> RoundState:
    """Returns the state after a segment in which this replica was away."""
    windows, num_steps = segment.windows, segment.num_steps
    state = passed_over(self._rounds, state, windows, num_steps)
    self.record(segment.stop)
    return state

  def end(self) -> None:
    """Says that the flush begins, in which nobody can join any more."""
    self._carrier.writes_snapshots = False

  def get_state(self) -> dict[str, Any]:
    """Returns what a checkpoint needs, as values of JSON."""
    return self._carrier.get_state()

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on where a checkpoint was saved.

    Raises:
      RefusedError: If the checkpoint is of another run than the store.
    """
    try:
      self._carrier.set_state(state)
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
    events, self._carrier.settled = self._carrier.settled, []
    usage, rules = self._carrier.mailbox.usage, self._carrier.mailbox.rules
    for event in events:
      self._rows.append({"step": step, "usage": usage, **event})
      self._say_changes(event["event"], event["members"])
    made = sum(n for kind, n in usage.items() if "bytes" not in kind)
    each = (made - self._requests) / max(len(events), 1)
    self._requests, here = made, f"{len(self._present)} of {rules.replicas}"
    return f"{here} here, {each:.0f} requests an event"

  def _say_changes(self, event: int, members: list[str]) -> None:
    if sorted(members) != self._present:
      names = ", ".join(members) or "nobody"
      logging.getLogger(__name__).info("event %d has %s", event, names)
      self._present = sorted(members)
