"""A made comparison of methods, to be reported on."""

import math

from dilocox_jax.report.convergence.comparison import (
  Claim,
  Comparison,
  EqualTime,
  MethodResult,
  Point,
  TimedResult,
  Trace,
)

CLOCKS = {
  "near": "tiny on 1gbit, 0.05 s a step (stated)",
  "large": "qwen_107b on dilocox_107b, 9 s a step, put on the losses of tiny",
}
SECONDS = {"near": 0.5, "large": 90.0}  # Of a step.


def trace(seed, loss, sent_bytes=1000, steps=(10, 20, 30, 40)):
  """A curve that falls to a loss."""
  points = [
    Point(
      100 * step,
      sent_bytes * step // steps[-1],
      loss + 4 * (1 / step - 1 / steps[-1]),
      {name: step * each_s for name, each_s in SECONDS.items()},
    )
    for step in steps
    if math.isfinite(loss)  # It diverged before the first.
  ]
  return Trace(seed, loss, sent_bytes, points)


def entry(name, *losses, sent_bytes=1000, **changed):
  fields = {
    "utilisation": {"near": 0.5, "large": 0.25},
    "seconds": {name: 40 * each_s for name, each_s in SECONDS.items()},
    "interval": 5,
    "overlap_steps": 0,
    "warm_start_steps": 0,
    "ends_round": True,
    "tuned": {"inner.learning_rate": 3e-3},
    "tuning_runs": 9,
    "tuning_rounds": 8,
  }
  traces = [trace(seed, x, sent_bytes) for seed, x in enumerate(losses)]
  return MethodResult(name, traces, **(fields | changed))


def comparison(**changed):
  """AllReduce ahead of two others, which overlap; one was stopped early."""
  fields = {
    "name": "made",
    "corpus": "feedfacefeedface",
    "budget": "40 inner steps of 2 replicas.",
    "seeds": 2,
    "clocks": CLOCKS,
    "target_loss": 1.11,
    "entries": [
      entry("allreduce", 1.00, 1.02, sent_bytes=10**9),
      entry("diloco", 1.05, 1.07, sent_bytes=10**7, interval=25),
      entry("dilocox", 1.06, 1.10, sent_bytes=10**6, ends_round=False),
      entry("eager", 1.20, edges=("warm-up 9, the lowest",)),
      entry("wild", 1.01, math.nan),
    ],
    "equal_time": [
      EqualTime(
        "near",
        3600.0,
        [
          TimedResult("allreduce", 12, 3600.0, False, (1.5, 1.6)),
          TimedResult("dilocox", 40, 1800.0, False, (1.06, 1.10)),
          TimedResult("eager", 3, math.nan, True, ()),
        ],
      )
    ],
    "claims": [
      Claim("allreduce", ("diloco", "dilocox"), "tokens", "us"),
      Claim("diloco", ("dilocox",), "tokens", "us"),
      Claim("dilocox", ("allreduce", "eager"), "near", "us"),
      Claim("dilocox", ("allreduce",), "large", "us"),
    ],
    "gaps": {"diloco": 0.04, "dilocox": 0.08, "absent": 0.1},
    "tuning": ["9 tuning runs a method."],
    "command": "python -m experiments.convergence",
  }
  return Comparison(**(fields | changed))
