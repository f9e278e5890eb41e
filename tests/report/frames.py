"""Frames made by hand, with numbers that can be checked in the head."""

from dilocox_jax.report.frame import Frame, Point, SeedRun, Setting

CLOCK = "1gbit"


def seed_run(seed, loss, sent_bytes, *, steps=100, losses=(), seconds=100.0):
  """A run whose evaluations are spread evenly over bytes and time."""
  count = len(losses)
  points = [
    Point(
      10 * steps * n // count,
      sent_bytes * n // count,
      each,
      {CLOCK: seconds * n / count},
    )
    for n, each in enumerate(losses, 1)
  ]
  return SeedRun(seed, loss, sent_bytes, steps, 10 * steps, points, 7.0)


def setting(name, losses, sent_bytes, baseline="allreduce", **others):
  """A setting with one run a seed, each with a curve of three points."""
  curve = {"steps": others.pop("steps", 100)}
  seconds = others.setdefault("seconds", {CLOCK: 100.0})[CLOCK]
  seed_runs = [
    seed_run(
      seed,
      loss,
      sent_bytes,
      losses=(loss + 2, loss + 1, loss),
      seconds=seconds,
      **curve,
    )
    for seed, loss in enumerate(losses)
  ]
  others.setdefault("utilization", {CLOCK: 0.5})
  return Setting(name, seed_runs, baseline, **others)


def frame(*settings, **others):
  """A frame on one clock, with two seeds each."""
  others = {"num_seeds": 2, "clocks": {CLOCK: "tiny on 1gbit"}} | others
  return Frame(settings, **others)  # pyright: ignore


ALLREDUCE = setting("allreduce", [2.0, 4.0], 8_000, seconds={CLOCK: 900.0})
# 3 % and 1 % above it: 2 % in the mean, by 0.01 either way.
DILOCO = setting("diloco", [2.06, 4.04], 1_000)
NOISY = setting("muloco", [2.2, 3.8], 2_000)
BOTH = frame(ALLREDUCE, DILOCO, NOISY)
