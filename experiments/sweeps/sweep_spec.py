"""A convergence sweep as checked values: methods, budgets, clocks, claims.

All that can be wrong with a sweep is found here, before its first run. What
is fair is kept here too: no method may have more tuning runs than another, and
no seed of the results may have been tuned on.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dilocox_jax.checks import known
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.sections import ModelConfig
from dilocox_jax.mapping import check_path, flat
from dilocox_jax.report.convergence.comparison import TOKENS, Claim
from experiments.sweeps import grid

SWEEP_FIELDS = (
  *("base", "methods", "tuning", "seeds", "clusters", "target_loss"),
  *("equal_time", "claims", "gaps", "notes"),
)
# Besides fields, what a tuning run may change: factors on what it began with.
FACTORS = {
  "inner_factor": "inner.learning_rate",
  "warmup_factor": "inner.warmup_steps",
}


@dataclasses.dataclass(frozen=True)
class SweepMethod:
  """One method of a sweep.

  Attributes:
    name: What reports call it.
    changed: Dotted fields that make it, over the base.
    refine: Settings to try at its best inner learning rate.
    tau_from: Clock whose transfer time gives tau and H; empty: as changed.
    interval_of: SweepMethod whose H this one has; empty: its own.
  """

  name: str
  changed: Mapping[str, Any]
  refine: tuple[Mapping[str, Any], ...] = ()
  tau_from: str = ""
  interval_of: str = ""


@dataclasses.dataclass(frozen=True)
class Tuning:
  """How every method is tuned.

  Attributes:
    seed: Of all tuning runs.
    total_steps: Inner steps of a tuning run.
    inner_learning_rates: Tried for every method.
  """

  seed: int
  total_steps: int
  inner_learning_rates: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class SweepClock:
  """A clock: a cluster and the model that is timed on it.

  Attributes:
    name: What reports call it.
    cluster: Preset or file.
    step_s: Seconds of an inner step; None: from operations.
    changed: Fields of the run that is timed, where it is not the one that
      was trained.
  """

  name: str
  cluster: str
  step_s: float | None = None
  changed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def timed(self, config: RunConfig) -> RunConfig:
    """The run that is timed in place of a trained one.

    A model replaces the other whole, sizes that were set included; a codec's
    settings apply where the codec has them.

    Args:
      config: The trained run.
    """
    values = flat(config.to_mapping())
    if "model.preset" in self.changed:
      values |= flat({"model": dataclasses.asdict(ModelConfig())})
    has = {
      path: value
      for path, value in self.changed.items()
      if not path.startswith("codec.") or values.get(path) is not None
    }
    return from_mapping(grid.nested(values | has))


@dataclasses.dataclass(frozen=True)
class Contest:
  """Methods in the time that one of them takes.

  Attributes:
    reference: Whose time it is.
    methods: Who has it.
  """

  reference: str
  methods: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """All that a sweep is.

  Attributes:
    base: Fields of every run.
    methods: In the order of tables.
    tuning: The budget of each.
    seeds: Of the results.
    clocks: By name, in the order of tables.
    target_loss: Of which reports say when it is reached (nats a token).
    contests: At equal time, by clock.
    claims: Orderings to look for.
    gaps: Most that a method may be above AllReduce (share of its loss).
    notes: Sentences on how to read the report.
  """

  base: Mapping[str, Any]
  methods: tuple[SweepMethod, ...]
  tuning: Tuning
  seeds: tuple[int, ...]
  clocks: Mapping[str, SweepClock]
  target_loss: float
  contests: Mapping[str, Contest]
  claims: tuple[Claim, ...]
  gaps: Mapping[str, float]
  notes: tuple[str, ...]

  def __post_init__(self):
    self._check_names()
    if self.tuning.seed in self.seeds or not self.seeds:
      raise ValueError(
        f"seeds={self.seeds} must be some, and not tuning.seed="
        f"{self.tuning.seed}: results on a seed that was tuned on flatter"
      )
    if len(set(self.seeds)) < len(self.seeds):
      raise ValueError(f"seeds={self.seeds} must differ")
    budgets = {method.name: len(method.refine) for method in self.methods}
    if len(set(budgets.values())) != 1:
      raise ValueError(
        f"every method needs as many settings in refine: {budgets}"
      )
    for method in self.methods:
      try:
        self.config(method.changed)
        for setting in method.refine:
          self.config({**method.changed, **_fields_of(setting)})
      except ValueError as error:
        raise ValueError(f"method {method.name!r}: {error}") from error

  @property
  def tuning_runs(self) -> int:
    """Of each method."""
    return len(self.tuning.inner_learning_rates) + len(self.methods[0].refine)

  def method(self, name: str) -> SweepMethod:
    """A method by its name."""
    return next(each for each in self.methods if each.name == name)

  def config(self, changed: Mapping[str, Any]) -> RunConfig:
    """The checked config of a run.

    Args:
      changed: Dotted fields over the base.

    Raises:
      ValueError: One line that names the field.
    """
    for path in changed:
      check_path(RunConfig, path)
    return from_mapping(grid.nested({**self.base, **changed}))

  def _check_names(self) -> None:
    names = [method.name for method in self.methods]
    if not names or len(set(names)) != len(names):
      raise ValueError(f"methods must be some, each named once: {names}")
    used = [*self.gaps, *(m.interval_of for m in self.methods if m.interval_of)]
    clocks = [each.tau_from for each in self.methods if each.tau_from]
    for clock, contest in self.contests.items():
      used += [contest.reference, *contest.methods]
      clocks.append(clock)
    for claim in self.claims:
      used += [claim.better, *claim.than]
    for name in used:
      known("method", name, names)
    for name in clocks:
      known("clock", name, list(self.clocks))
    for claim in self.claims:
      self._check_time(claim)
    for method in self.methods:
      self._check_interval(method)

  def _check_interval(self, method: SweepMethod) -> None:
    if method.interval_of and self.method(method.interval_of).interval_of:
      raise ValueError(
        f"method {method.name!r} has the H of {method.interval_of!r}, which has"
        " that of another: name the last one"
      )

  def _check_time(self, claim: Claim) -> None:
    if claim.at == TOKENS:
      return
    known("clock of equal_time", claim.at, list(self.contests))
    for name in (claim.better, *claim.than):
      if name not in self.contests[claim.at].methods:
        raise ValueError(
          f"equal_time on {claim.at!r} lacks {name!r}, of which a claim speaks:"
          " add it to its methods"
        )


def check_sweep_field(path: str) -> None:
  """Raises ValueError, with the nearest name, for no field of a sweep."""
  head, _, rest = path.partition(".")
  known("field", head, SWEEP_FIELDS)
  if head == "base" and rest:
    check_path(RunConfig, rest)


def sweep(values: Mapping[str, Any]) -> Sweep:
  """Reads a sweep from a config's plain values.

  Args:
    values: By `SWEEP_FIELDS`.

  Raises:
    ValueError: One line that says what to change.
  """
  for name in values:
    check_sweep_field(name)
  for name in SWEEP_FIELDS:
    if name not in values:
      raise ValueError(f"field {name!r} is missing")
  clocks = [_clock(each) for each in values["clusters"]]
  tuning = values["tuning"]
  return Sweep(
    base=flat(values["base"]),
    methods=tuple(_method(each) for each in values["methods"]),
    tuning=Tuning(
      tuning["seed"],
      tuning["total_steps"],
      tuple(tuning["inner_learning_rates"]),
    ),
    seeds=tuple(values["seeds"]),
    clocks={each.name: each for each in clocks},
    target_loss=values["target_loss"],
    contests={
      each["clock"]: Contest(each["reference"], tuple(each["methods"]))
      for each in values["equal_time"]
    },
    claims=tuple(
      Claim(each["better"], tuple(each["than"]), each["at"], each["source"])
      for each in values["claims"]
    ),
    gaps=dict(values["gaps"]),
    notes=tuple(values["notes"]),
  )


def _method(given: Mapping[str, Any]) -> SweepMethod:
  fields = dict(given)
  name = fields.pop("name")
  refine = tuple(dict(each) for each in fields.pop("refine"))
  links = {k: fields.pop(k, "") for k in ("tau_from", "interval_of")}
  return SweepMethod(name, flat(fields), refine, **links)


def _clock(given: Mapping[str, Any]) -> SweepClock:
  fields = dict(given)
  name, cluster = fields.pop("name"), fields.pop("cluster")
  step_s = fields.pop("step_s", None)
  for path in flat(fields):
    check_path(RunConfig, path)
  return SweepClock(name, cluster, step_s, flat(fields))


def _fields_of(setting: Mapping[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in setting.items() if k not in FACTORS}
