"""The settings of the study of the gap, the most informative settings first.

A setting is everything about a run but its rates and its seed. Most settings
differ from one setting, the center, in one thing, such as the number of
replicas, H or the batch. Each setting is compared with AllReduce at the same
number of sequences a step. AllReduce is also trained with other numbers of
sequences, to find with how many it ends at the replicas' loss.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from experiments.gaps.settings import FILES, Setting

# Runs of this size and of this number of replicas are held out: the law of the
# gap is not fitted on them, but predicts them (docs/results/predictions.md).
HELD_OUT_SIZE = "131k"
HELD_OUT_REPLICAS = 16


class Group(NamedTuple):
  """Settings that answer one question.

  Attributes:
    name: What the settings vary, in a few words.
    settings: The settings, in the order in which they are trained.
  """

  name: str
  settings: tuple[Setting, ...]


# Most things vary around the smallest model, because its runs take seconds.
_CENTER = Setting("26k", replicas=4, batch=4, steps=256, interval=16)
_MIDDLE = Setting("59k", replicas=4, batch=4, steps=576, interval=16)
# Ten tokens a parameter, as twenty would take too long.
_LARGE = Setting("131k", replicas=4, batch=4, steps=640, interval=16)


def _divided(setting: Setting, *divisions: str) -> Iterable[Setting]:
  """Yields a setting once for each division of a step among replicas.

  The division "2x8" is two replicas with eight sequences in a step each.
  """
  for division in divisions:
    replicas, batch = division.split("x")
    yield dataclasses.replace(setting, replicas=int(replicas), batch=int(batch))


def _intervals(setting: Setting, *intervals: int) -> Iterable[Setting]:
  """Yields a setting once for each H, the number of inner steps of a round."""
  for interval in intervals:
    yield dataclasses.replace(setting, interval=interval)


def _allreduce(setting: Setting, *batches: int) -> Iterable[Setting]:
  """Yields AllReduce with the model, the steps and the text of a setting.

  There is one for each of `batches`, the numbers of sequences in a step.
  """
  for batch in batches:
    yield Setting(
      setting.size,
      replicas=1,
      batch=batch,
      steps=setting.steps,
      source=setting.source,
    )


def _cpu() -> list[Group]:
  """Returns the settings for CPUs: three sizes of up to 131,000 parameters."""
  half = dataclasses.replace(_CENTER, steps=_CENTER.steps // 2)
  double = dataclasses.replace(_CENTER, steps=2 * _CENTER.steps)
  long = dataclasses.replace(_CENTER, steps=4 * _CENTER.steps)
  short_delay: dict[str, Any] = {"delay": 2}
  one_bit: dict[str, Any] = {"bits": 1}
  both = short_delay | one_bit
  two_and_eight = ("2x8", "8x2")
  # The numbers are sequences in a step for `_allreduce`, and values of H for
  # `_intervals`.
  return [
    Group(
      "center",
      (
        *_allreduce(_CENTER, 16, 8, 4, 32),
        _CENTER,
        *_divided(_CENTER, *two_and_eight),
      ),
    ),
    Group(
      "middle size",
      (
        *_allreduce(_MIDDLE, 16, 8, 4, 32),
        _MIDDLE,
        *_divided(_MIDDLE, *two_and_eight),
      ),
    ),
    Group("H, four replicas", tuple(_intervals(_CENTER, 4, 8, 32))),
    Group(
      "H, two and eight replicas",
      tuple(
        setting
        for division in _divided(_CENTER, *two_and_eight)
        for setting in _intervals(division, 4, 8, 32)
      ),
    ),
    Group(
      "delay and bits",
      tuple(
        dataclasses.replace(_CENTER, **changes)
        for changes in (both, short_delay, one_bit)
      ),
    ),
    Group("one replica", tuple(_divided(_CENTER, "1x16"))),
    Group(
      "data-parallel start of a sixth",
      # Of 256 steps, 48 leave whole rounds of 16.
      (dataclasses.replace(_CENTER, warm_start=48),),
    ),
    Group(
      "delay and bits, two and eight replicas",
      tuple(
        dataclasses.replace(setting, **both)
        for setting in _divided(_CENTER, *two_and_eight)
      ),
    ),
    Group(
      "twice the length",
      (
        *_allreduce(double, 16, 8, 4),
        double,
        *_divided(double, *two_and_eight),
      ),
    ),
    Group(
      "batch",
      (
        *_divided(_CENTER, "4x1", "4x2"),
        *_allreduce(_CENTER, 2, 64),
        *_divided(_CENTER, "4x8", "4x16", "2x4", "8x4"),
      ),
    ),
    Group(
      "half the length",
      (
        *_allreduce(half, 16, 8, 4),
        half,
        *_divided(half, *two_and_eight),
      ),
    ),
    Group(
      "four times the length",
      (
        *_allreduce(long, 16, 8, 4),
        long,
        *_divided(long, *two_and_eight),
      ),
    ),
    Group(
      "momentum",
      (
        *(
          dataclasses.replace(setting, momentum=0.95)
          for setting in _allreduce(_CENTER, 16)
        ),
        dataclasses.replace(_CENTER, momentum=0.95),
        dataclasses.replace(_CENTER, outer_momentum=0.6),
      ),
    ),
    Group(
      "H and delay, middle size",
      (
        *_intervals(_MIDDLE, 4, 32),
        dataclasses.replace(_MIDDLE, **both),
      ),
    ),
    Group("held out: sixteen replicas", tuple(_divided(_CENTER, "16x1"))),
    Group(
      "held out: large size",
      (
        *_allreduce(_LARGE, 16, 8, 4),
        _LARGE,
        *_divided(_LARGE, *two_and_eight),
      ),
    ),
    Group(
      "held out: sixteen replicas, middle size",
      tuple(_divided(_MIDDLE, "16x1")),
    ),
  ]


def _gpu() -> list[Group]:
  """Returns the settings for an accelerator: 0.9 to 10 million parameters.

  The runs have 2,000 or 17,000 steps.
  """
  tiny = Setting("857k", replicas=4, batch=4, steps=2000, interval=20)
  long = dataclasses.replace(tiny, steps=17_000)
  middle = dataclasses.replace(tiny, size="2300k")
  large = dataclasses.replace(tiny, size="10000k")
  return [
    Group("AllReduce, 0.9 M", tuple(_allreduce(tiny, 16, 8, 4))),
    Group("replicas, 0.9 M", (tiny, *_divided(tiny, "2x8", "8x2"))),
    Group("2.3 M", (*_allreduce(middle, 16, 8), middle)),
    Group("17,000 steps", (*_allreduce(long, 16), long)),
    Group("10 M", (*_allreduce(large, 16), large)),
  ]


def _texts() -> list[Group]:
  """Returns settings on texts to which the law was not fitted."""
  centers = [dataclasses.replace(_CENTER, source=source) for source in FILES]
  return [
    Group(
      "AllReduce",
      tuple(
        setting for center in centers for setting in _allreduce(center, 16, 8)
      ),
    ),
    Group("four replicas", tuple(centers)),
    Group(
      "delay and bits",
      tuple(dataclasses.replace(center, delay=2, bits=1) for center in centers),
    ),
  ]


# The lists of settings: functions that return the groups of each list.
DESIGNS = {"cpu": _cpu, "gpu": _gpu, "texts": _texts}
