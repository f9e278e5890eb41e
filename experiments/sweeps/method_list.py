"""The methods of a convergence sweep, as diffs that the configs already are.

A method here is what its own config file says beyond the default, and nothing
written twice. Ranks and H do not adapt, so that a run's plan is known before
it starts and any clock can be put on it afterwards; what adapting does is in
docs/log.md.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.mapping import flat
from experiments.configs import default

# Learning rate and momentum of the outer optimizer: every method that has one
# sees all of them, the one that its config brings included.
OUTER_GRID = (
  *((0.7, 0.6), (0.7, 0.9), (0.7, 0.3), (0.7, 0.0)),
  *((1.0, 0.0), (0.4, 0.0)),
)
# Inner rates are chosen before: at a momentum that short rounds do not bear,
# the choice would be for the momentum's sake.
OUTER_START = {"outer.learning_rate": 0.7, "outer.momentum": 0.6}
# Where a stale pseudo-gradient replaces one's own progress, any momentum is
# too much: with the start above, the lowest inner rate of the grid was best.
RESET_START = {"outer.learning_rate": 0.7, "outer.momentum": 0.0}
# Methods without one get as many runs, on what they do have.
INNER_GRID = (
  {"inner_factor": 0.75},
  {"inner_factor": 1.3},
  {"warmup_factor": 0.5},
  {"warmup_factor": 2.0},
  {"inner_factor": 1.3, "warmup_factor": 2.0},
)
PLAIN = {"codec.name": "float32"}
# Readings of DiLoCoX's apply rule, and what each starts from.
DILOCOX_RULES: Mapping[str, Mapping[str, float]] = {
  "continue": {},
  "reset": RESET_START,
}
# Without an outer optimizer, or with one that only averages.
_AVERAGES = ("allreduce", "cocktail_sgd", "cocktail_params")


def of(config: str, name: str = "", **others: Any) -> dict[str, Any]:
  """A method of a sweep.

  Args:
    config: Name of its file in `experiments/configs`.
    name: What the sweep calls it; by default the same.
    **others: `changed`, fields to set on top; `tau_from`, a clock whose
      transfer time gives tau and H; `interval_of`, a method whose H it has.
  """
  module = importlib.import_module(f"experiments.configs.{config}")
  before = flat(default.get_config().to_dict())
  own = flat(module.get_config().to_dict()) | {"adaptive.mode": "off"}
  fields = {k: v for k, v in own.items() if v != before[k]}
  fields |= others.pop("changed", {})
  refine = INNER_GRID if config in _AVERAGES else _outer_grid(before | fields)
  return {"name": name or config, "refine": refine, **others, **fields}


def _outer_grid(fields: dict[str, Any]) -> tuple[dict[str, float], ...]:
  own = (fields["outer.learning_rate"], fields["outer.momentum"])
  return tuple(
    {"outer.learning_rate": rate, "outer.momentum": momentum}
    for rate, momentum in OUTER_GRID
    if (rate, momentum) != own
  )


def _every(interval: int, **fields: Any) -> dict[str, Any]:
  return {"sync.sync_interval": interval, **fields}


def warm(num_steps: int) -> dict[str, Any]:
  """Fields of a data-parallel start, as DiLoCo was published.

  Source: DiLoCo, arXiv 2311.08105 (recalled): 24,000 of 88,000 steps.

  Args:
    num_steps: Inner steps before the first round.
  """
  return {
    "sync.warm_start": "data_parallel",
    "sync.warm_start_steps": num_steps,
  }


def streaming_methods(
  interval: int, overlap_steps: int = 4
) -> list[dict[str, Any]]:
  """Streaming DiLoCo, one of its three ideas after the other.

  Args:
    interval: H (inner steps).
    overlap_steps: tau of those that overlap (inner steps).
  """
  at = _every(interval)
  waits = {"sync.overlap_steps": 0, "sync.mixing_alpha": 0.0}
  hides = {"sync.overlap_steps": overlap_steps}
  name = "streaming"
  return [
    of("streaming_diloco", name, changed=at | waits | PLAIN),
    of("streaming_diloco", f"{name}_overlap", changed=at | hides | PLAIN),
    of("streaming_diloco", f"{name}_e3m0", changed=at | hides),
  ]


def ours(clock: str) -> dict[str, Any]:
  """DiLoCoX that keeps progress and waits no longer than a transfer takes.

  Args:
    clock: The one that says how long that is.
  """
  delayed = {"sync.method": "delayed", "sync.rule": "continue"}
  return of("dilocox", f"ours_{clock}", changed=delayed, tau_from=clock)


def on_clock(clock: str) -> list[dict[str, Any]]:
  """Methods whose H follows from a clock: DiLoCoX, OpenDiLoCo beside it, ours.

  DiLoCoX, in both readings, has the shortest rounds behind which its exchange
  hides, as its own rule for H asks.

  Args:
    clock: Which clock; names end with it.
  """
  continues = f"dilocox_continue_{clock}"
  return [
    of(
      "open_diloco",
      f"open_diloco_{clock}",
      changed=OUTER_START,
      interval_of=continues,
    ),
    *(
      of(
        "dilocox",
        f"dilocox_{rule}_{clock}",
        changed={"sync.rule": rule, **start},
        tau_from=clock,
      )
      for rule, start in DILOCOX_RULES.items()
    ),
    ours(clock),
  ]


def every(
  interval: int, open_interval: int, warm_steps: int, clocks: Sequence[str]
) -> list[dict[str, Any]]:
  """All methods, the published ones and ours.

  DiLoCo alone has a warm start, as published; without one it is there too.

  Args:
    interval: The common H (inner steps).
    open_interval: H of OpenDiLoCo as published (inner steps).
    warm_steps: Of DiLoCo's data-parallel start (inner steps).
    clocks: Those from which H follows, where it follows from one.
  """
  at = _every(interval)
  return [
    of("allreduce"),
    # Beside MuLoCo: what its optimizer gains is not to pass for its exchange's.
    of("allreduce", "allreduce_muon", changed={"inner.optimizer": "muon"}),
    of("cocktail_sgd"),
    of("cocktail_params"),
    of("diloco", changed=at | warm(warm_steps)),
    of("diloco", "diloco_cold", changed=at),
    of(
      "open_diloco",
      "open_diloco_long",
      changed=_every(open_interval) | OUTER_START,
    ),
    *streaming_methods(interval),
    of("eager", changed=at),
    of("sparse_loco", changed=at),
    of("muloco", changed=at),
    *(method for clock in clocks for method in on_clock(clock)),
  ]


def _rivals(clock: str) -> tuple[str, ...]:
  return (
    *(f"open_diloco_{clock}", "open_diloco_long"),
    *("cocktail_sgd", "cocktail_params"),
  )


def contests(clocks: Sequence[str]) -> list[dict[str, Any]]:
  """Methods at equal time: those of the published orderings, and ours.

  Args:
    clocks: Those from which H follows.
  """
  return [
    {
      "clock": clock,
      "reference": f"dilocox_continue_{clock}",
      "methods": (
        *("allreduce", "diloco_cold", *_rivals(clock)),
        *(f"dilocox_{rule}_{clock}" for rule in DILOCOX_RULES),
        f"ours_{clock}",
      ),
    }
    for clock in clocks
  ]


def claims(clock: str, clock_107b: str) -> list[dict[str, Any]]:
  """The published orderings, for either reading of DiLoCoX's apply rule.

  DiLoCoX's were published at equal steps; at equal time they are what its
  compression and overlap are for.

  Args:
    clock: Of the models that are trained.
    clock_107b: Of the large model, on which AllReduce has hardly a step.
  """
  published = [
    *("diloco", "diloco_cold", *_rivals(clock), "eager", "sparse_loco"),
    *("muloco", "streaming", "streaming_overlap", "streaming_e3m0"),
    *(f"dilocox_{rule}_{clock}" for rule in DILOCOX_RULES),
  ]
  rivals = (
    (clock, (*_rivals(clock), "diloco_cold", "allreduce")),
    (clock_107b, (*_rivals(clock_107b), "diloco_cold")),
  )
  return [
    claim("allreduce", published, "tokens", "all papers"),
    claim("allreduce_muon", ["muloco"], "tokens", "MuLoCo (recalled)"),
    claim("muloco", ["diloco_cold"], "tokens", "MuLoCo (recalled)"),
    claim("sparse_loco", ["diloco_cold"], "tokens", "SparseLoCo (recalled)"),
    *(
      claim(f"dilocox_{rule}_{at}", _rivals(at), "tokens", "DiLoCoX (recalled)")
      for at, _ in rivals
      for rule in DILOCOX_RULES
    ),
    *(
      claim(f"dilocox_{rule}_{at}", than, at, "ours, after DiLoCoX")
      for at, than in rivals
      for rule in DILOCOX_RULES
    ),
    *(
      claim(f"ours_{at}", [f"dilocox_continue_{at}"], at, "ours")
      for at, _ in rivals
    ),
  ]


def claim(
  better: str, than: Sequence[str], at: str, source: str
) -> dict[str, Any]:
  """An ordering to look for.

  Args:
    better: Method that should end lower.
    than: Those that should end higher.
    at: "tokens", or a clock.
    source: Who says so, and how well that is known.
  """
  return {"better": better, "than": than, "at": at, "source": source}
