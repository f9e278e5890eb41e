"""All replicas of a run in one JAX runtime, which may have several processes.

The replicas of a run may also be separate programs that use a mailbox. Then the
trainer takes `mailbox_replica.MailboxReplica`, which has the same methods, in
place of `LocalReplicas`.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.config import RunConfig
from dilocox_jax.metrics.run_logs import RunLog
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training.overrides import Overrides
from dilocox_jax.trees import Tree


class LocalReplicas:
  """All replicas of a run, which live in this runtime.

  Most methods do nothing here. Only `MailboxReplica`, which has the same
  methods, needs them.

  Attributes:
    config: Config of the run.
    is_behind: Whether other replicas have finished the next exchange without
      these replicas; always False.
  """

  is_behind = False

  def __init__(self, config: RunConfig):
    """Stores the config."""
    self.config = config

  def with_exchange(self, overrides: Overrides, text_digest: str) -> Overrides:
    """Returns the overrides unchanged: only a mailbox adds an exchange."""
    del text_digest
    return overrides

  def attach(
    self,
    rounds: Rounds,
    traffic: Traffic,
    params: Tree,
    optimizer: Tree,
    batch: Tree,
  ) -> None:
    """Stores the programs of the rounds. The other arguments are not read."""
    del traffic, params, optimizer, batch
    self._rounds = rounds

  def check_processes(self) -> None:
    """Does nothing: the trainer itself compares the processes."""

  def enter(
    self, values: Mapping[str, Any], override_names: Sequence[str]
  ) -> None:
    """Does nothing: replicas in one runtime have no mailbox to enter."""

  def open(
    self,
    workdir: pathlib.Path,
    resume_step: int | None,
    log: RunLog | None,
  ) -> None:
    """Does nothing: these replicas write no rows of their own."""

  @property
  def indices(self) -> Sequence[int]:
    """Indices of this process's replicas among the M replicas of the plan."""
    return self._rounds.replicas.own

  def join(self, state: RoundState, total_steps: int) -> RoundState | None:
    """Returns None: in one runtime, no replica joins the run late."""
    del state, total_steps
    return None

  def skip_segment(self, state: RoundState, segment: Segment) -> RoundState:
    """Raises AssertionError: these replicas have never missed an exchange."""
    raise AssertionError("replicas in one runtime are never behind")

  def request_stop(self) -> None:
    """Does nothing: these replicas send no requests to a store."""

  def end(self) -> None:
    """Does nothing. The trainer calls this method after the last inner step."""

  def record(self, step: int) -> str:
    """Records nothing, and returns "" as the note for the progress line."""
    del step
    return ""

  def get_state(self) -> dict[str, Any] | None:
    """Returns None: these replicas have nothing to save in a checkpoint."""
    return None

  def set_state(self, state: Mapping[str, Any] | None) -> None:
    """Does nothing: these replicas have saved nothing in a checkpoint."""
