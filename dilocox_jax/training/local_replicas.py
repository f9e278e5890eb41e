"""The replicas of a run that are all in this runtime.

A trainer goes through its plan in the same way whether it has all replicas or
one that meets others in a store. What differs it asks of an object: this one,
or `mailbox_replica.MailboxReplica`, which has the same methods.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training.parts import Parts
from dilocox_jax.trees import Tree


class LocalReplicas:
  """All replicas of a run.

  Attributes:
    config: Config of the run.
    is_behind: Whether others have settled the next event already; False.
  """

  is_behind = False

  def __init__(self, config: RunConfig):
    """Enters nothing.

    Args:
      config: Config of the run.
    """
    self.config = config

  def with_exchange(self, parts: Parts, text_digest: str) -> Parts:
    """Returns the parts of a run with what averages over its replicas.

    Args:
      parts: Parts that are handed in.
      text_digest: Digest of the training text.
    """
    del text_digest
    return parts

  def attach(
    self, rounds: Rounds, params: Tree, optimizer: Tree, batch: Tree
  ) -> None:
    """Is told the rounds that the run goes through.

    Args:
      rounds: First rounds of the run.
      params: Shapes and types of the parameters.
      optimizer: Shapes and types of the inner optimizer's state.
      batch: Shapes and types of a batch of one inner step, leaves [B, ...].
    """
    del params, optimizer, batch
    self._rounds = rounds

  def enter(self, values: Mapping[str, Any], handed_in: Sequence[str]) -> None:
    """Enters the run, of which there is nothing to enter here.

    Args:
      values: Config of the run, with its sections.
      handed_in: Names of the parts that the caller handed in.
    """

  def open(self, workdir: pathlib.Path, resume_step: int | None) -> None:
    """Opens the files of its own, of which there are none.

    Args:
      workdir: The run directory.
      resume_step: Inner step of the restored checkpoint, if there is one.
    """

  @property
  def numbers(self) -> Sequence[int]:
    """Which of the M replicas of the plan are in this process."""
    return self._rounds.replicas.own

  def joined(self, state: RoundState, total_steps: int) -> RoundState | None:
    """Returns the state with which a newcomer takes part; None if it is none.

    Args:
      state: The first state of the run.
      total_steps: Inner steps of the run.
    """
    del state, total_steps
    return None

  def passed_over(self, state: RoundState, segment: Segment) -> RoundState:
    """Returns the state after a segment in which replicas were away.

    Args:
      state: State before it.
      segment: The segment.
    """
    raise AssertionError("replicas in one runtime are never behind")

  def request_stop(self) -> None:
    """Is told that the run is to stop after the segment under way."""

  def end(self) -> None:
    """Is told that the flush begins."""

  def record(self, step: int) -> str:
    """Records what has happened; returns a note for the progress line.

    Args:
      step: Inner steps finished.
    """
    del step
    return ""

  def get_state(self) -> dict[str, Any] | None:
    """Returns what a checkpoint needs, as values of JSON; None: nothing."""
    return None

  def set_state(self, state: Mapping[str, Any] | None) -> None:
    """Goes on where a checkpoint was saved.

    Args:
      state: What `get_state` returned.
    """
