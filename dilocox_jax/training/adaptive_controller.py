"""Chooses the rank of a codec, and H (the steps of a round), during a run.

With adaptive compression, which needs the codec `low_rank`, the controller
measures the *energy rank* of each averaged update: how many singular values
hold a given share of the update's squared norm. After every
`adaptive.window_rounds` rounds, `plan.adaptive` chooses the next rank, and
maybe the next H, from these measurements. Without adaptive compression, rank
and H are those of the config.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dilocox_jax.aggregators.sizes import message_bytes
from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.low_rank import with_rank
from dilocox_jax.distributed import processes
from dilocox_jax.outer.drift import Drift
from dilocox_jax.plan.adaptive import RoundSetting, energy_rank, spectra_of
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training.build import Programs
from dilocox_jax.training.states import TrainingState


class AdaptiveController:
  """Holds the rank and H of a run's rounds, and may change them during the run.

  Attributes:
    setting: Current rank and H of the rounds.
    is_adaptive: Whether the setting may change.
  """

  def __init__(self, programs: Programs):
    """Starts with the rank and H of a run's programs."""
    self._first = programs
    self._policy = programs.policy
    self._rounds = {self._policy.first: programs.rounds}
    # Inner step of the run at which H changed last; None if it never changed.
    self._since: int | None = None
    # Energy rank of each exchange since the last choice.
    self._measured: list[float] = []
    self.setting = self._policy.first
    self.is_adaptive = self._policy.mode != "off"

  @property
  def rounds(self) -> Rounds:
    """Programs of rounds with the current rank and H."""
    if self.setting not in self._rounds:
      first_rounds = self._first.rounds
      traffic = self.traffic
      outer = dataclasses.replace(
        first_rounds.outer,
        method=traffic.method,
        aggregator=self._first.aggregator_of(traffic.codec),
      )
      rounds = dataclasses.replace(first_rounds, outer=outer)
      self._rounds[self.setting] = rounds
    return self._rounds[self.setting]

  @property
  def traffic(self) -> Traffic:
    """Computes the bytes that rounds with the current rank and H send."""
    first_traffic = self._first.traffic
    codec = with_rank(first_traffic.codec, self.setting.rank)
    return dataclasses.replace(
      first_traffic, method=self.plan.method, codec=codec
    )

  @property
  def plan(self) -> RunPlan:
    """Plan of the run with the current H.

    After a change of H, the plan treats the round before the change as if it
    had the new H, too, because the update of this round may not be applied yet.
    Example: if H changes from 8 to 5 at step 24, the new schedule starts at
    step 24 - 5 = 19, so that its round 0 ends at step 24.
    """
    plan = self._first.plan.at_interval(self.setting.sync_interval)
    if self._since is None:
      return plan
    start = self._since - self.setting.sync_interval
    return dataclasses.replace(plan, schedule_start=start)

  def observe(self, drifts: Sequence[Drift]) -> None:
    """Records the energy rank of each averaged update of a segment (a round).

    The energy rank is how many singular values hold a given share of the
    squared norm. Without adaptive compression nothing is recorded.
    """
    if not self.is_adaptive:
      return
    for drift in drifts:
      spectra = spectra_of(drift.observed)
      if spectra:
        self._measured.append(energy_rank(spectra, self._policy.energy))

  def is_choice_due(self, pending: Segment | None = None) -> bool:
    """Whether enough energy ranks were measured to choose a new setting.

    Each applied update of a fragment (a part of the parameters) is measured.
    For example, if `adaptive.window_rounds` is 5 and there are 3 fragments, 15
    measurements are enough.

    Args:
      pending: Segment (a round) whose drifts `observe` has not got yet. The
        updates that it applies count as measured. None: there is no such
        segment.
    """
    if not self.is_adaptive:
      return False
    num_measured = len(self._measured)
    if pending is not None:
      for window in pending.windows:
        if window.applied is not None:
          num_measured += 1
    num_fragments = self._first.plan.method.schedule.num_fragments
    return num_measured >= self._policy.window_rounds * num_fragments

  def with_choice(self, state: TrainingState, segment: Segment) -> RoundState:
    """Chooses a new rank and H, and returns the state for the next rounds.

    In the state, only the counter `step` changes. All processes must call this
    method.

    Args:
      state: State after the segment.
      segment: Segment (a round) that has just ended.
    """
    self.choose_setting(segment)
    # The last bits of a spectrum can differ between machines, and so could the
    # choice. So all processes take the choice of the main process.
    self.set_state(processes.from_main(self.get_state()))
    assert isinstance(state, RoundState), "only rounds measure a rank"
    return self.rounds.states.with_step(
      state, self.plan.schedule_step(segment.stop)
    )

  def choose_setting(self, segment: Segment) -> None:
    """Chooses the rank and H of the rounds that follow a segment (a round).

    The choice uses the energy ranks that were measured since the last choice.
    Afterwards they are forgotten.
    """
    setting = self._policy.next_setting(self._measured, self._bytes_of)
    if setting.sync_interval != self.setting.sync_interval:
      self._since = segment.stop
    self.setting = setting
    self._measured = []

  def _bytes_of(self, rank: int) -> int:
    """Returns the bytes of a replica's messages in a round at a given rank."""
    traffic = self._first.traffic
    return message_bytes(with_rank(traffic.codec, rank), traffic.shapes)

  def get_state(self) -> dict[str, Any]:
    """Returns choices and measurements for a checkpoint, as JSON values."""
    return {
      "choice": dataclasses.asdict(self.setting),
      "since": self._since,
      # A copy, because a checkpoint may be written in the background.
      "measured": list(self._measured),
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores choices and measurements that `get_state` returned."""
    self.setting = RoundSetting(**state["choice"])
    self._since = state["since"]
    self._measured = list(state["measured"])
