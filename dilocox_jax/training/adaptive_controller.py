"""Chooses the rank and H of the rounds while a run is under way.

Without adaptive compression all rounds have the rank and H of the config. With
it, the controller measures the rank of the averaged update in every round.
After `adaptive.window_rounds` rounds, the policy chooses the rank and H of the
next rounds from these measurements. Every checkpoint contains the measurements
and the choices. So a run that was stopped and continued makes the same choices
as a run that was never stopped.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.outer.drift import Drift
from dilocox_jax.outer.programs import RoundPrograms
from dilocox_jax.plan.schedule.membership import Absences
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.plan.wire.adaptive import RoundSetting
from dilocox_jax.plan.wire.chain import num_bytes
from dilocox_jax.plan.wire.leaf import Leaf, leaf_of
from dilocox_jax.plan.wire.ranks import leaf_ranks, measured_rank, spectra_of
from dilocox_jax.plan.wire.reduction import LowRank
from dilocox_jax.plan.wire.traffic import Traffic
from dilocox_jax.training import build
from dilocox_jax.training.parts import NO_PARTS, Parts


class AdaptiveController:
  """Holds the rank and H of a run's rounds, and changes them during the run.

  The method, the schedule and the phases of the run follow from the current
  rank and H. So the trainer reads them from `plan`.

  Attributes:
    setting: Current rank and H of the rounds.
    is_adaptive: Whether the setting may change.
  """

  def __init__(
    self,
    config: RunConfig,
    programs: build.Programs,
    parts: Parts = NO_PARTS,
  ):
    """Starts with the rank and H of the config.

    Args:
      config: Config of the run.
      programs: Programs of the run.
      parts: Parts that take the place of what the config names.
    """
    self._config, self._parts, self._shapes = config, parts, programs.shapes
    self._policy = to_plan.policy(config)
    self._rounds = {self._policy.first: programs.rounds}
    self._chosen: dict[int, RoundSetting] = {}
    self._since: int | None = None
    self._measured: list[float] = []
    self._spectra: dict[str, np.ndarray] = {}
    self.setting = self._policy.first
    self.is_adaptive = config.adaptive.mode != "off"
    self._joined: Absences = ()

  @property
  def rounds(self) -> RoundPrograms:
    """Programs of rounds with the current rank and H.

    The programs of a setting are built once and then reused.
    """
    if self.setting not in self._rounds:
      self._rounds[self.setting] = dataclasses.replace(
        self._rounds[self._policy.first],
        outer=build.outer_transform(self._config, self.setting, self._parts),
      )
    return self._rounds[self.setting]

  @property
  def traffic(self) -> Traffic:
    """Counts the bytes that rounds with the current rank and H send."""
    return to_plan.traffic(self._config, self.setting, self._shapes)

  @property
  def plan(self) -> RunPlan:
    """Plan of the run with the current H.

    After a change of H, an update that the last round sent is still in flight,
    and the new schedule must apply it. So the plan treats the last round as if
    it had the new H too. Example: if H changes from 8 to 5 at step 24, the new
    schedule starts at step 24 - 5 = 19. Its round 0 then ends at step 24, where
    the update was sent.
    """
    plan = to_plan.run_plan(self._config, self.setting, self._joined)
    if self._since is None:
      return plan
    start = self._since - self.setting.sync_interval
    return dataclasses.replace(plan, schedule_start=start)

  def observe(self, drifts: Sequence[Drift]) -> None:
    """Records the ranks of the averaged updates of a segment.

    Args:
      drifts: One drift for each exchange. Its field `observed` has the arrays
        from which ranks are measured.
    """
    adaptive = self._config.adaptive
    for drift in drifts:
      spectra = spectra_of(drift.observed) if self.is_adaptive else {}
      if spectra:
        rank = measured_rank(spectra, adaptive.criterion, adaptive.energy)
        self._measured.append(rank)
        self._spectra |= spectra

  def is_choice_due(self, unread: Segment | None = None) -> bool:
    """Whether enough ranks were measured to choose a new setting.

    Every fragment is measured once in a round. For example 5 rounds of 3
    fragments have 15 measurements.

    Args:
      unread: Segment whose drifts are not yet recorded. Its ranks are counted
        as if they were.
    """
    windows = unread.windows if unread else ()
    num_unread = sum(window.applied is not None for window in windows)
    fragments = self._config.sync.named.schedule.num_fragments
    num_needed = self._config.adaptive.window_rounds * fragments
    num_measured = len(self._measured) + num_unread
    return self.is_adaptive and num_measured >= num_needed

  def choose_setting(self, segment: Segment) -> None:
    """Chooses the setting of the rounds that follow a segment.

    When a rank is chosen for the first time, it is divided among the leaves.
    Later choices of this rank use the same division. So there are never more
    programs than ranks to choose from.

    Args:
      segment: Segment that has just ended.
    """
    before = self.setting
    setting = self._policy.next_setting(self._measured, self._bytes_of)
    if self._config.adaptive.by_leaf and setting.rank not in self._chosen:
      setting = dataclasses.replace(setting, leaf_ranks=self._by_leaf(setting))
    setting = self._chosen.setdefault(setting.rank, setting)
    if setting.sync_interval != before.sync_interval:
      self._since = segment.stop
    self.setting, self._measured, self._spectra = setting, [], {}

  def _bytes_of(self, rank: int) -> int:
    setting = dataclasses.replace(self._policy.first, rank=rank)
    return num_bytes(to_plan.payload(self._config, setting), self._shapes)

  def _by_leaf(self, setting: RoundSetting) -> tuple[tuple[str, int], ...]:
    """Divides the rank of a setting among the leaves by their spectra.

    Returns:
      Pairs of leaf path and rank. Together they cost as many bytes as the
      setting's rank costs if all leaves have it.
    """
    leaves = {p: leaf_of(p, self._shapes[p]) for p in self._spectra}
    cost = {p: leaf.num_layers * sum(leaf.shape) for p, leaf in leaves.items()}
    ranks = leaf_ranks(
      self._spectra,
      cost,
      sum(setting.rank * values for values in cost.values()),
      {p: _max_rank(leaf, self._policy.first) for p, leaf in leaves.items()},
    )
    return tuple(sorted(ranks.items()))

  def get_state(self) -> dict[str, Any]:
    """Returns choices and measurements for a checkpoint, as plain values."""
    chosen = self._chosen.values()
    return {
      "choice": dataclasses.asdict(self.setting),
      "chosen": [dataclasses.asdict(setting) for setting in chosen],
      "since": self._since,
      "joined": [list(each) for each in self._joined],
      "measured": self._measured,
      "spectra": {k: v.tolist() for k, v in self._spectra.items()},
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores choices and measurements that `get_state` returned."""
    self.setting = _setting(state["choice"])
    chosen = [_setting(saved) for saved in state["chosen"]]
    self._chosen = {setting.rank: setting for setting in chosen}
    self._since, self._measured = state["since"], list(state["measured"])
    # Older checkpoints do not know of replicas that joined.
    self._joined = tuple(tuple(each) for each in state.get("joined", ()))
    self._spectra = {k: np.asarray(v) for k, v in state["spectra"].items()}


def _setting(saved: dict[str, Any]) -> RoundSetting:
  pairs = tuple((path, rank) for path, rank in saved["leaf_ranks"])
  return RoundSetting(saved["rank"], saved["sync_interval"], pairs)


def _max_rank(leaf: Leaf, first: RoundSetting) -> int:
  """Returns the largest rank that saves bytes and fits into codec states.

  Args:
    leaf: Shape of the leaf.
    first: Setting of the first rounds, which has the largest common rank.
  """
  ranks = range(1, to_plan.ROOM_BY_LEAF * first.rank + 1)
  return max(rank for rank in ranks if LowRank(rank).factorises(leaf))
