"""Steers a run from round to round: which program, which bytes, which steps.

Without adaptive compression every round is like the first. With it, the rank
of the averaged update is measured in every round, and after each window the
policy chooses the rank and H of the next. What is remembered is in every
checkpoint, so that a run that was stopped chooses as one that was not.
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

Spectra = dict[str, np.ndarray]


class AdaptiveController:
  """The rounds of a run, as they are chosen on the way.

  Attributes:
    choice: What rounds run with now.
    is_adaptive: Whether that may change.
  """

  def __init__(self, config: RunConfig, programs: build.Programs):
    """Begins with the config's own choice.

    Args:
      config: The run.
      programs: Its programs.
    """
    self._config = config
    self._policy = to_plan.policy(config)
    self._rounds = {self._policy.first: programs.rounds}
    self._chosen: dict[int, RoundSetting] = {}
    self._since: int | None = None
    self._measured: list[float] = []
    self._spectra: Spectra = {}
    self.choice = self._policy.first
    self.is_adaptive = config.adaptive.mode != "off"

  @property
  def rounds(self) -> RoundPrograms:
    """The programs of the present choice; each is built once."""
    if self.choice not in self._rounds:
      built = build.programs(self._config, self.choice)
      self._rounds[self.choice] = built.rounds
    return self._rounds[self.choice]

  @property
  def traffic(self) -> Traffic:
    """The bytes of the present choice."""
    return to_plan.traffic(self._config, self.choice)

  @property
  def plan(self) -> RunPlan:
    """The plan in force: H is the choice's, counted from where it began.

    The round before that looks like one of the same H, so what it sent is
    found in flight.
    """
    plan = to_plan.run_plan(self._config, self.choice)
    if self._since is None:
      return plan
    start = self._since - self.choice.sync_interval
    return dataclasses.replace(plan, schedule_start=start)

  def note(self, drifts: Sequence[Drift]) -> None:
    """Takes in what was measured in a segment.

    Args:
      drifts: For every piece with an arrival what was reported.
    """
    adaptive = self._config.adaptive
    for drift in drifts:
      if not drift.observed or not self.is_adaptive:
        continue
      for each in by_window(drift):
        grams = {k: np.asarray(v) for k, v in each.observed.items()}
        spectra = spectra_of(grams)
        if spectra:
          rank = measured_rank(spectra, adaptive.criterion, adaptive.energy)
          self._measured.append(rank)
          self._spectra |= spectra

  def is_window_full(self) -> bool:
    """Whether enough was measured for a new choice.

    Fragments are measured in turn, and each once a round.
    """
    return self.is_adaptive and len(self._measured) >= self._window

  def may_turn(self, segment: Segment) -> bool:
    """Whether a segment whose drifts are not known yet may fill the window."""
    arrivals = sum(window.applied is not None for window in segment.windows)
    return self.is_adaptive and len(self._measured) + arrivals >= self._window

  @property
  def _window(self) -> int:
    """Measurements before a new choice."""
    fragments = self._config.sync.named.schedule.num_fragments
    return self._config.adaptive.window_rounds * fragments

  def turn(self, segment: Segment) -> None:
    """Chooses anew after a window that ends with a segment.

    A rank's division among the leaves is settled when it is first chosen, so
    that there are never more programs than ranks on the ladder.
    """
    before = self.choice
    choice = self._policy.next_setting(self._measured, self._bytes_of)
    if self._config.adaptive.by_leaf and choice.rank not in self._chosen:
      choice = dataclasses.replace(choice, leaf_ranks=self._by_leaf(choice))
    choice = self._chosen.setdefault(choice.rank, choice)
    if choice.sync_interval != before.sync_interval:
      self._since = segment.stop
    self.choice, self._measured, self._spectra = choice, [], {}

  def _bytes_of(self, rank: int) -> int:
    choice = dataclasses.replace(self._policy.first, rank=rank)
    shapes = parameter_shapes(self._config.model.shape)
    return num_bytes(to_plan.payload(self._config, choice), shapes)

  def _by_leaf(self, choice: RoundSetting) -> tuple[tuple[str, int], ...]:
    """Ranks by leaf for the bytes of one rank for all."""
    shapes = parameter_shapes(self._config.model.shape)
    leaves = {path: leaf_of(path, shapes[path]) for path in self._spectra}
    cost = {p: leaf.num_layers * sum(leaf.shape) for p, leaf in leaves.items()}
    ranks = leaf_ranks(
      self._spectra,
      cost,
      sum(choice.rank * values for values in cost.values()),
      {p: _most(leaf, self._policy.first) for p, leaf in leaves.items()},
    )
    return tuple(sorted(ranks.items()))

  def get_state(self) -> dict[str, Any]:
    """What a checkpoint must hold, as plain values."""
    return {
      "choice": dataclasses.asdict(self.choice),
      "chosen": [dataclasses.asdict(each) for each in self._chosen.values()],
      "since": self._since,
      "measured": self._measured,
      "spectra": {k: v.tolist() for k, v in self._spectra.items()},
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from `get_state`."""
    self.choice = _choice(state["choice"])
    chosen = [_choice(each) for each in state["chosen"]]
    self._chosen = {each.rank: each for each in chosen}
    self._since, self._measured = state["since"], list(state["measured"])
    self._spectra = {k: np.asarray(v) for k, v in state["spectra"].items()}


def _choice(saved: dict[str, Any]) -> RoundSetting:
  pairs = tuple((path, rank) for path, rank in saved["leaf_ranks"])
  return RoundSetting(saved["rank"], saved["sync_interval"], pairs)


def _most(leaf: Leaf, first: RoundSetting) -> int:
  """The largest rank that saves bytes and that states have room for."""
  ranks = range(1, to_plan.ROOM_BY_LEAF * first.rank + 1)
  return max(r for r in ranks if LowRank(r).factorises(leaf))
