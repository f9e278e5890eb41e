"""The settings of the study, the most informative ones first.

Around a center, one thing is varied at a time: replicas, H, batch, length,
delay and bits, a data-parallel start, size. Every gap has AllReduce at the
same sequences of a step, and at fewer, whose losses say how many sequences the
replicas are worth.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from experiments.gaps.settings import Setting

# What the fit of the law does not read (docs/results/predictions.md).
HELD_OUT_SIZE = "131k"
HELD_OUT_REPLICAS = 16


class Group(NamedTuple):
  """Settings that answer one question.

  Attributes:
    name: The question, in a few words.
    settings: The settings, in the order in which they are trained.
  """

  name: str
  settings: tuple[Setting, ...]


_CENTER = Setting("59k", replicas=4, batch=4, steps=576, interval=16)
_SMALL = Setting("26k", replicas=4, batch=4, steps=256, interval=16)
_LARGE = Setting("131k", replicas=4, batch=4, steps=1280, interval=16)


def _divided(setting: Setting, *sizes: str) -> Iterable[Setting]:
  """Returns a setting with other numbers of replicas and sequences.

  Args:
    setting: The setting.
    *sizes: Replicas and sequences of each, such as "2x8".
  """
  for size in sizes:
    replicas, batch = map(int, size.split("x"))
    yield dataclasses.replace(setting, replicas=replicas, batch=batch)


def _allreduce(setting: Setting, *batches: int) -> Iterable[Setting]:
  """Returns AllReduce with a setting's model and steps at some batches."""
  for batch in batches:
    yield Setting(setting.size, replicas=1, batch=batch, steps=setting.steps)


def _cpu() -> list[Group]:
  center_steps = _CENTER.steps
  half = dataclasses.replace(_CENTER, steps=center_steps // 2)
  double = dataclasses.replace(_CENTER, steps=2 * center_steps)
  short_delay: dict[str, Any] = {"delay": 2}
  one_bit: dict[str, Any] = {"bits": 1}
  both = short_delay | one_bit
  small_long = dataclasses.replace(_SMALL, steps=1024)
  small_longest = dataclasses.replace(_SMALL, steps=4096)
  small_same = dataclasses.replace(_SMALL, steps=center_steps)
  start = center_steps // 6
  return [
    Group("four replicas, center", (*_allreduce(_CENTER, 16, 8), _CENTER)),
    Group(
      "two and eight replicas, center",
      (*_divided(_CENTER, "2x8", "8x2"), *_allreduce(_CENTER, 4, 32)),
    ),
    Group(
      "H, four replicas",
      tuple(dataclasses.replace(_CENTER, interval=h) for h in (4, 32, 8)),
    ),
    Group(
      "small size",
      (
        *_allreduce(_SMALL, 16, 8, 4, 32),
        _SMALL,
        *_divided(_SMALL, "2x8", "8x2"),
      ),
    ),
    Group(
      "data-parallel start of a sixth",
      (dataclasses.replace(_CENTER, warm_start=start),),
    ),
    Group(
      "delay and bits",
      tuple(
        dataclasses.replace(_CENTER, **each)
        for each in (both, short_delay, one_bit)
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
      "length, four replicas",
      (
        *_allreduce(small_long, 16, 8, 4),
        small_long,
        *_allreduce(small_longest, 16, 8, 4),
        small_longest,
      ),
    ),
    Group(
      "half the length",
      (
        *_allreduce(half, 16, 8, 4),
        half,
        *_divided(half, "2x8", "8x2"),
      ),
    ),
    Group(
      "twice the length",
      (
        *_allreduce(double, 16, 8, 4),
        double,
        *_divided(double, "2x8", "8x2"),
      ),
    ),
    Group(
      "H, two and eight replicas",
      tuple(
        dataclasses.replace(each, interval=h)
        for each in _divided(_CENTER, "2x8", "8x2")
        for h in (4, 32)
      ),
    ),
    Group("one replica", (*_divided(_CENTER, "1x16"),)),
    Group(
      "delay and bits, two and eight replicas",
      tuple(
        dataclasses.replace(each, **both)
        for each in _divided(_CENTER, "2x8", "8x2")
      ),
    ),
    Group(
      "momentum",
      (
        *(
          dataclasses.replace(s, momentum=0.95) for s in _allreduce(_CENTER, 16)
        ),
        dataclasses.replace(_CENTER, momentum=0.95),
        dataclasses.replace(_CENTER, outer_momentum=0.6),
      ),
    ),
    Group(
      "small size at the steps of the center",
      (
        *_allreduce(small_same, 16, 8, 4),
        small_same,
        *_divided(small_same, "2x8", "8x2"),
      ),
    ),
    Group(
      "held out: sixteen replicas",
      (
        *_divided(_CENTER, "16x1", "16x2"),
        *_divided(_SMALL, "16x1"),
      ),
    ),
    Group(
      "held out: large size",
      (
        *_allreduce(_LARGE, 16, 8, 4),
        _LARGE,
        *_divided(_LARGE, "2x8", "8x2"),
      ),
    ),
  ]


def _gpu() -> list[Group]:
  """Settings for an accelerator: larger sizes, and 17,000 steps."""
  tiny = Setting("857k", replicas=4, batch=4, steps=2000, interval=20)
  long = dataclasses.replace(tiny, steps=17_000)
  middle = dataclasses.replace(tiny, size="2300k")
  large = dataclasses.replace(tiny, size="10000k")
  return [
    Group("AllReduce, 0.9 M", (*_allreduce(tiny, 16, 8, 4),)),
    Group("replicas, 0.9 M", (tiny, *_divided(tiny, "2x8", "8x2"))),
    Group("2.3 M", (*_allreduce(middle, 16, 8), middle)),
    Group("17,000 steps", (*_allreduce(long, 16), long)),
    Group("10 M", (*_allreduce(large, 16), large)),
  ]


DESIGNS = {"cpu": _cpu, "gpu": _gpu}
