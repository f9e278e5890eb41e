"""Adaptive compression: which rank, and which H, the next rounds run with.

Every round the rank of the averaged update is measured; after a window of
rounds the mean sets the next rank, on a short ladder, since each rung is a
program of its own. H follows, so that a transfer still just hides behind the
local steps: it took no longer than H inner steps with the first rank, and it
takes less in proportion to the bytes. Everything here is a pure function of
what was measured, so that a run continues as if it had not been interrupted.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from dilocox_jax.plan.wire.chain import ByLeaf, Chain, links_of
from dilocox_jax.plan.wire.payload import Payload
from dilocox_jax.plan.wire.reduction import LowRank

MODES = ("off", "rank", "rank_and_interval")
# An update that fills more than this share of its rank may have directions
# that were not sent: there must be room to see them.
_FULL = 0.9


@dataclasses.dataclass(frozen=True)
class RoundSetting:
  """What the rounds of a window run with.

  Attributes:
    rank: Of low-rank factors; 0 where there are none.
    sync_interval: H (inner steps).
    leaf_ranks: Pairs of path and rank for leaves that differ.
  """

  rank: int
  sync_interval: int
  leaf_ranks: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Policy:
  """How settings follow from measurements.

  Source: DiLoCoX, arXiv 2506.21263, Algorithm 3 (recalled): r_t is the mean
  effective rank of a window, H_t = H_1 r_t / r_1. Differs: ranks move on a
  ladder; H follows the bytes, which are not quite proportional to the rank.

  Attributes:
    first: The setting to begin with: the largest rank, and its H.
    window_rounds: Rounds measured between settings, c.
    adapts_interval: Whether H follows the rank.
    num_rungs: Ranks on the ladder at most.
  """

  first: RoundSetting
  window_rounds: int = 5
  adapts_interval: bool = False
  num_rungs: int = 5

  @property
  def ladder(self) -> tuple[int, ...]:
    """Ranks to choose among, descending: down to an eighth of the first."""
    lowest = max(1, self.first.rank // 8)
    rungs = {
      round(self.first.rank * (lowest / self.first.rank) ** share)
      for share in (n / (self.num_rungs - 1) for n in range(self.num_rungs))
    }
    return tuple(sorted(rungs, reverse=True))

  def next_setting(
    self,
    measured: Sequence[float | int],
    bytes_of: Callable[[int], int],
  ) -> RoundSetting:
    """The setting after a window: room for what was measured, and a tenth.

    What is measured never exceeds the rank in force, so the rank grows by one
    rung a window.

    Args:
      measured: Rank of the averaged update, one value a round.
      bytes_of: Rank to the bytes of a sync.
    """
    ladder = self.ladder
    needed = sum(measured) / len(measured) / _FULL
    rank = min([r for r in ladder if r >= needed], default=ladder[0])
    return RoundSetting(
      rank, self.interval(bytes_of(rank), bytes_of(ladder[0]))
    )

  def interval(self, num_bytes: int, first_bytes: int) -> int:
    """The shortest H behind which a transfer hides as the first one did.

    Args:
      num_bytes: Of a sync (bytes).
      first_bytes: Of a sync with the first setting (bytes).
    """
    if not self.adapts_interval:
      return self.first.sync_interval
    share = num_bytes / first_bytes
    return max(1, math.ceil(self.first.sync_interval * share))


def with_ranks(payload: Payload, setting: RoundSetting) -> Payload:
  """A payload with the ranks of a setting; others stay as they are."""
  if not setting.leaf_ranks:
    return _with_rank(payload, setting.rank)
  special = tuple(
    (path, _with_rank(payload, rank)) for path, rank in setting.leaf_ranks
  )
  return ByLeaf(_with_rank(payload, setting.rank), special)


def _with_rank(payload: Payload, rank: int) -> Payload:
  if low_rank_of(payload) is None:
    return payload
  return Chain(
    tuple(
      dataclasses.replace(part, rank=rank)
      if isinstance(part, LowRank)
      else part
      for part in links_of(payload)
    )
  )


def low_rank_of(payload: Payload) -> LowRank | None:
  """The low-rank part of a chain, if it has one."""
  links = links_of(payload)
  return next((link for link in links if isinstance(link, LowRank)), None)
