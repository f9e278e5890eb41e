"""The methods of a convergence sweep, as differences from the default config.

The fields of a method are those of its own config file in
`experiments/configs`, so nothing is written twice. Ranks and H do not adapt in
a sweep: a run's plan is known before it starts, and any clock can be put on it
afterwards. What adapting does is in docs/log.md.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.mapping import flat
from experiments.configs.overlap_loco import AVERAGE

# Learning rate and momentum of the outer optimizer: every method that has one
# sees all of them, the one of its own config included.
OUTER_GRID = (
  *((0.7, 0.6), (0.7, 0.9), (0.7, 0.3), (0.7, 0.0)),
  *((1.0, 0.0), (0.4, 0.0)),
)
# The inner rate is chosen before the outer settings. A momentum that is too
# high for short rounds would make a lower inner rate look best.
OUTER_START = {"outer.learning_rate": 0.7, "outer.momentum": 0.6}
# Where a stale pseudo-gradient replaces a replica's own progress, any momentum
# is too high: with OUTER_START the lowest inner rate of the grid was best.
RESET_START = {"outer.learning_rate": 0.7, "outer.momentum": 0.0}
# Methods without an outer optimizer get as many runs, on what they do have.
INNER_GRID = (
  {"inner_factor": 0.75},
  {"inner_factor": 1.3},
  {"warmup_factor": 0.5},
  {"warmup_factor": 2.0},
  {"inner_factor": 1.3, "warmup_factor": 2.0},
)
# The two inner optimizers of the sweeps. Most methods have AdamW by default.
ADAMW, MUON = {"inner.optimizer": "adamw"}, {"inner.optimizer": "muon"}
# Methods that figures draw in front, most important first, and from which they
# have their colours. A name stands for the methods of that name on every clock.
FRONT = (
  *("allreduce", "overlap_loco", "allreduce_muon_average", "muloco"),
  "allreduce_muon",
  *("dilocox_continue", "diloco", "open_diloco", "cocktail_sgd", "ours"),
  "cocktail_params",
)
# The two readings of DiLoCoX's apply rule, and what each starts from.
DILOCOX_RULES: Mapping[str, Mapping[str, float]] = {
  "continue": {},
  "reset": RESET_START,
}
# Methods without an outer optimizer, or with one that only averages.
_AVERAGES = ("allreduce", "cocktail_sgd", "cocktail_params")


def of(config: str, name: str = "", **others: Any) -> dict[str, Any]:
  """Returns a method of a sweep.

  Args:
    config: Name of the method's file in `experiments/configs`.
    name: Name of the method in the sweep; by default that of the file.
    **others: `changed`, fields to set on top; `tau_from`, a clock whose
      transfer time gives tau and H; `interval_of`, a method whose H it has.
  """
  module = importlib.import_module(f"experiments.configs.{config}")
  before = flat(RunConfig().to_mapping())
  values = from_mapping(module.get_config().to_dict()).to_mapping()
  after = flat(values) | {"adaptive.mode": "off"}
  fields = {k: v for k, v in after.items() if v != before[k]}
  fields |= others.pop("changed", {})
  refine = INNER_GRID if config in _AVERAGES else _outer_grid(before | fields)
  return {"name": name or config, "refine": refine, **others, **fields}


def _outer_grid(fields: dict[str, Any]) -> tuple[dict[str, float], ...]:
  """`OUTER_GRID` without the pair that the method has already.

  That pair was tried with every inner learning rate before.
  """
  paths = ("outer.learning_rate", "outer.momentum")
  start = tuple(fields[path] for path in paths)
  return tuple(
    dict(zip(paths, pair, strict=True)) for pair in OUTER_GRID if pair != start
  )


def warm(num_steps: int) -> dict[str, Any]:
  """Returns the fields of a data-parallel start, as DiLoCo was published.

  Source: DiLoCo, arXiv 2311.08105 (recalled): 24,000 of 88,000 steps.

  Args:
    num_steps: Inner steps before the first round.
  """
  start, steps = "sync.warm_start", "sync.warm_start_steps"
  return {start: "data_parallel", steps: num_steps}


def streaming_methods(
  interval: int, overlap_steps: int = 4
) -> list[dict[str, Any]]:
  """Returns Streaming DiLoCo with one, two and three of its three ideas.

  The ideas are fragments, overlap and few bits.

  Args:
    interval: H (inner steps).
    overlap_steps: tau of the methods that overlap (inner steps).
  """
  at, fp32 = {"sync.sync_interval": interval}, {"codec.name": "float32"}
  waits = {"sync.overlap_steps": 0, "sync.mixing_alpha": 0.0}
  overlaps = {"sync.overlap_steps": overlap_steps}
  return [
    of("streaming_diloco", name, changed=at | changed)
    for name, changed in (
      ("streaming", waits | fp32),
      ("streaming_overlap", overlaps | fp32),
      ("streaming_e3m0", overlaps),
    )
  ]


def dilocox_methods(
  suffix: str, changed: Mapping[str, Any], **links: str
) -> list[dict[str, Any]]:
  """Returns DiLoCoX in both readings of its apply rule.

  Args:
    suffix: End of the methods' names.
    changed: Fields to set.
    **links: `tau_from`, as for `of`.
  """
  return [
    of(
      "dilocox",
      f"dilocox_{rule}{suffix}",
      changed={**changed, "sync.rule": rule, **start},
      **links,
    )
    for rule, start in DILOCOX_RULES.items()
  ]


def ours(clock: str) -> dict[str, Any]:
  """Returns DiLoCoX that keeps progress and waits only while a transfer runs.

  Args:
    clock: Name of the clock that says how long a transfer takes.
  """
  delayed = {"sync.method": "delayed", "sync.rule": "continue"}
  return of("dilocox", f"ours_{clock}", changed=delayed, tau_from=clock)


def on_clock(clock: str) -> list[dict[str, Any]]:
  """Returns the methods whose H follows from a clock.

  These are OpenDiLoCo, DiLoCoX in both readings, and ours. DiLoCoX has the
  shortest rounds that hide its exchange, as its own rule for H asks.
  OpenDiLoCo has the same H.

  Args:
    clock: Name of the clock. The names of the methods end with it.
  """
  name, other = f"open_diloco_{clock}", f"dilocox_continue_{clock}"
  return [
    of("open_diloco", name, changed=OUTER_START, interval_of=other),
    *dilocox_methods(f"_{clock}", {}, tau_from=clock),
    ours(clock),
  ]


def every(
  interval: int, open_interval: int, warm_steps: int, clocks: Sequence[str]
) -> list[dict[str, Any]]:
  """Returns all methods, the published ones and ours.

  Only DiLoCo has a warm start, as it was published. `diloco_cold` has none.

  Args:
    interval: The common H (inner steps).
    open_interval: H of OpenDiLoCo as it was published (inner steps).
    warm_steps: Inner steps of DiLoCo's data-parallel start.
    clocks: Names of the clocks from which some methods take their H.
  """
  at = {"sync.sync_interval": interval}
  rounds_of_eighths = {"sync.sync_interval": 16, "sync.num_fragments": 8}
  long = {"sync.sync_interval": open_interval}
  return [
    of("allreduce"),
    # Beside MuLoCo, so that the gain of Muon is not taken for one of exchange.
    of("allreduce", "allreduce_muon", changed=MUON),
    # Beside `overlap_loco`, which keeps an average of its parameters too.
    of("allreduce", "allreduce_muon_average", changed=MUON | AVERAGE),
    of("cocktail_sgd"),
    of("cocktail_params"),
    of("diloco", changed=at | warm(warm_steps)),
    of("diloco", "diloco_cold", changed=at),
    of("open_diloco", "open_diloco_long", changed=long | OUTER_START),
    *streaming_methods(interval),
    *(of(name, changed=at) for name in ("eager", "sparse_loco", "muloco")),
    # Two steps hide an eighth of the model on every clock of the sweeps.
    *(
      of("overlap_loco", name, changed=rounds_of_eighths | inner)
      for name, inner in (("overlap_loco", {}), ("overlap_loco_adamw", ADAMW))
    ),
    *(method for clock in clocks for method in on_clock(clock)),
  ]


def _rivals(clock: str) -> tuple[str, ...]:
  return (
    *(f"open_diloco_{clock}", "open_diloco_long"),
    *("cocktail_sgd", "cocktail_params"),
  )


def contests(clocks: Sequence[str]) -> list[dict[str, Any]]:
  """Returns who has equal time: every method that could win it on a clock.

  Those are all but DiLoCo with a warm start, whose start alone takes longer,
  and the methods whose H was made for another clock.

  Args:
    clocks: Names of the clocks from which some methods take their H.
  """
  return [
    {
      "clock": clock,
      "reference": f"dilocox_continue_{clock}",
      "methods": (
        *("allreduce", "diloco_cold", *_rivals(clock)),
        *(f"dilocox_{rule}_{clock}" for rule in DILOCOX_RULES),
        f"ours_{clock}",
        *("streaming", "streaming_overlap", "streaming_e3m0"),
        *("eager", "sparse_loco", "overlap_loco_adamw"),
        *("allreduce_muon", "muloco", "overlap_loco"),
      ),
    }
    for clock in clocks
  ]


def claims(clock: str, clock_107b: str) -> list[dict[str, Any]]:
  """Returns the published orderings, for both readings of DiLoCoX's rule.

  DiLoCoX's orderings were published at equal steps. At equal time they are
  what its compression and overlap are for.

  Args:
    clock: Clock of the models that are trained.
    clock_107b: Clock of the large model, on which AllReduce has hardly a step.
  """
  published = [
    *("diloco", "diloco_cold", *_rivals(clock), "eager", "sparse_loco"),
    *("muloco", "streaming", "streaming_overlap", "streaming_e3m0"),
    *(f"dilocox_{rule}_{clock}" for rule in DILOCOX_RULES),
  ]
  found = [
    claim("allreduce", published, "tokens", "all papers"),
    claim("allreduce_muon", ["muloco"], "tokens", "MuLoCo (recalled)"),
    claim("muloco", ["diloco_cold"], "tokens", "MuLoCo (recalled)"),
    claim("sparse_loco", ["diloco_cold"], "tokens", "SparseLoCo (recalled)"),
  ]
  at_time = []
  for at, others in ((clock, ["allreduce"]), (clock_107b, [])):
    rivals = _rivals(at)
    for rule in DILOCOX_RULES:
      name, than = f"dilocox_{rule}_{at}", [*rivals, "diloco_cold", *others]
      found.append(claim(name, rivals, "tokens", "DiLoCoX (recalled)"))
      at_time.append(claim(name, than, at, "ours, after DiLoCoX"))
  return [
    *found,
    *at_time,
    *(
      claim(better, [than], at, "ours")
      for at in (clock, clock_107b)
      for better, than in (
        (f"ours_{at}", f"dilocox_continue_{at}"),
        ("overlap_loco", "muloco"),
      )
    ),
  ]


def claim(
  better: str, than: Sequence[str], at: str, source: str
) -> dict[str, Any]:
  """Returns an ordering to look for.

  Args:
    better: Name of the method that should end lower.
    than: Names of the methods that should end higher.
    at: "tokens", or the name of a clock.
    source: Who says so, and how well that is known.
  """
  return {"better": better, "than": than, "at": at, "source": source}
