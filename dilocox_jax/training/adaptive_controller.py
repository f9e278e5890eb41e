"""Chooses the rank and H of the rounds while a run is under way.

Without adaptive compression every round is like the first. With it, the rank
of the averaged update is measured in every round, and after a number of rounds
(`adaptive.window_rounds`) the policy chooses rank and H of the next ones. All
that it remembers is in every checkpoint, so a run that was stopped chooses the
same as one that was not.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.outer.drift import Drift, by_window
from dilocox_jax.outer.programs import RoundPrograms
from dilocox_jax.plan.model.shapes import parameter_shapes
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.plan.wire.adaptive import RoundSetting
from dilocox_jax.plan.wire.chain import num_bytes
from dilocox_jax.plan.wire.leaf import Leaf, leaf_of
from dilocox_jax.plan.wire.ranks import leaf_ranks, measured_rank, spectra_of
from dilocox_jax.plan.wire.reduction import LowRank
from dilocox_jax.plan.wire.traffic import Traffic
from dilocox_jax.training import build


class AdaptiveController:
  """The rounds of a run, whose rank and H may change on the way.

  Its `plan` is the plan in force: whoever asks for the method, the schedule or
  the phase of a run asks here.

  Attributes:
    setting: Rank and H of the rounds from now on.
    is_adaptive: Whether the setting may change.
  """

  def __init__(self, config: RunConfig, programs: build.Programs):
    """Begins with the setting of the config.

    Args:
      config: Config of the run.
      programs: Programs of the run.
    """
    self._config = config
    self._policy = to_plan.policy(config)
    self._rounds = {self._policy.first: programs.rounds}
    self._chosen: dict[int, RoundSetting] = {}
    self._since: int | None = None
    self._measured: list[float] = []
    self._spectra: dict[str, np.ndarray] = {}
    self.setting = self._policy.first
    self.is_adaptive = config.adaptive.mode != "off"

  @property
  def rounds(self) -> RoundPrograms:
    """The programs of the present setting; each is built once."""
    if self.setting not in self._rounds:
      self._rounds[self.setting] = dataclasses.replace(
        self._rounds[self._policy.first],
        outer=build.outer_transform(self._config, self.setting),
      )
    return self._rounds[self.setting]

  @property
  def traffic(self) -> Traffic:
    """Bytes that rounds of the present setting send."""
    return to_plan.traffic(self._config, self.setting)

  @property
  def plan(self) -> RunPlan:
    """The plan in force, whose schedule counts from when its H began.

    The schedule must find the exchange in flight that the round before sent.
    So the plan pretends that this round had the new H too: if H changes from 8
    to 5 at step 24, the schedule counts from step 19, and what was sent at
    step 24 is what its round 0 sent at its end.
    """
    plan = to_plan.run_plan(self._config, self.setting)
    if self._since is None:
      return plan
    start = self._since - self.setting.sync_interval
    return dataclasses.replace(plan, schedule_start=start)

  def observe(self, drifts: Sequence[Drift]) -> None:
    """Adds the ranks that were measured in a segment.

    Args:
      drifts: Drifts of every window group with an apply.
    """
    adaptive = self._config.adaptive
    for drift in drifts:
      if not drift.observed or not self.is_adaptive:
        continue
      for window_drift in by_window(drift):
        grams = {k: np.asarray(v) for k, v in window_drift.observed.items()}
        spectra = spectra_of(grams)
        if spectra:
          rank = measured_rank(spectra, adaptive.criterion, adaptive.energy)
          self._measured.append(rank)
          self._spectra |= spectra

  def is_choice_due(self) -> bool:
    """Whether enough ranks were measured for a new choice."""
    return self.is_adaptive and len(self._measured) >= self._num_measurements

  def may_become_due(self, segment: Segment) -> bool:
    """Whether a choice may be due once a segment's drifts are known."""
    applies = sum(window.applied is not None for window in segment.windows)
    num_measured = len(self._measured) + applies
    return self.is_adaptive and num_measured >= self._num_measurements

  @property
  def _num_measurements(self) -> int:
    """Measurements for one choice: every fragment is measured once a round."""
    fragments = self._config.sync.named.schedule.num_fragments
    return self._config.adaptive.window_rounds * fragments

  def choose_setting(self, segment: Segment) -> None:
    """Chooses the setting of the rounds that follow a segment.

    How a rank is divided among the leaves is settled when the rank is first
    chosen, so there are never more programs than ranks to choose from.
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
    shapes = parameter_shapes(self._config.model.shape)
    return num_bytes(to_plan.payload(self._config, setting), shapes)

  def _by_leaf(self, setting: RoundSetting) -> tuple[tuple[str, int], ...]:
    """Returns ranks by leaf that cost the bytes of one rank for all leaves."""
    shapes = parameter_shapes(self._config.model.shape)
    leaves = {path: leaf_of(path, shapes[path]) for path in self._spectra}
    cost = {p: leaf.num_layers * sum(leaf.shape) for p, leaf in leaves.items()}
    ranks = leaf_ranks(
      self._spectra,
      cost,
      sum(setting.rank * values for values in cost.values()),
      {p: _max_rank(leaf, self._policy.first) for p, leaf in leaves.items()},
    )
    return tuple(sorted(ranks.items()))

  def get_state(self) -> dict[str, Any]:
    """Returns what a checkpoint must hold, as plain values."""
    chosen = self._chosen.values()
    return {
      "choice": dataclasses.asdict(self.setting),
      "chosen": [dataclasses.asdict(setting) for setting in chosen],
      "since": self._since,
      "measured": self._measured,
      "spectra": {k: v.tolist() for k, v in self._spectra.items()},
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from what `get_state` returned."""
    self.setting = _setting(state["choice"])
    chosen = [_setting(saved) for saved in state["chosen"]]
    self._chosen = {setting.rank: setting for setting in chosen}
    self._since, self._measured = state["since"], list(state["measured"])
    self._spectra = {k: np.asarray(v) for k, v in state["spectra"].items()}


def _setting(saved: dict[str, Any]) -> RoundSetting:
  pairs = tuple((path, rank) for path, rank in saved["leaf_ranks"])
  return RoundSetting(saved["rank"], saved["sync_interval"], pairs)


def _max_rank(leaf: Leaf, first: RoundSetting) -> int:
  """Returns the largest rank that saves bytes and fits into codec states."""
  ranks = range(1, to_plan.ROOM_BY_LEAF * first.rank + 1)
  return max(r for r in ranks if LowRank(r).factorises(leaf))
