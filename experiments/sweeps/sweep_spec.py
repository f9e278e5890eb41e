"""A convergence sweep as checked values: methods, budgets, clocks, claims.

All that can be wrong with a sweep is found here, before its first run. So is
what would be unfair: no method may have more tuning runs than another, and no
seed of the results may be the seed of tuning.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.checks import in_front, known, require
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.sections import ModelConfig
from dilocox_jax.mapping import check_path, flat
from dilocox_jax.report.convergence.comparison import TOKENS, Claim
from dilocox_jax.simulate.transfer import Transport
from experiments.sweeps import run_spec

# Besides fields, a tuning run may change factors on the best inner settings.
FACTORS = {
  "inner_factor": "inner.learning_rate",
  "warmup_factor": "inner.warmup_steps",
}


@dataclasses.dataclass(frozen=True, eq=False)
class SweepMethod:
  """One method of a sweep; equal to itself only, so it can be a cache's key.

  Attributes:
    name: Name of the method in reports.
    changed: Values by dotted field that make it, over the sweep's base.
    refine: Settings to try at its best inner learning rate.
    tau_from: Name of the clock whose transfer time gives tau and H; empty if
      they are as in `changed`.
    interval_of: Name of the method whose H this one has; empty: its own.
    given: Values by dotted field that its results run with although its tuning
      was not finished; empty: tuning chooses.
  """

  name: str
  changed: Mapping[str, Any]
  refine: tuple[Mapping[str, Any], ...] = ()
  tau_from: str = ""
  interval_of: str = ""
  given: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Tuning:
  """How every method is tuned.

  Attributes:
    seed: Seed of all tuning runs.
    total_steps: Inner steps of a tuning run.
    inner_learning_rates: Rates that are tried for every method. If there are
      none, every method runs with the settings that it has.
  """

  seed: int
  total_steps: int
  inner_learning_rates: Sequence[float]


@dataclasses.dataclass(frozen=True)
class SweepClock:
  """A clock: a cluster and the model that is timed on it.

  Attributes:
    cluster: Preset or file of the cluster.
    step_s: Seconds of an inner step; None: derived from operations.
    changed: Fields of the run that is timed, where it is not the one that is
      trained.
    transport: How messages are sent. Steps, H and tau of the committed sweeps
      follow from messages that wait a round trip each, as gloo's do. With
      another transport the sweeps would ask for other runs.
  """

  cluster: str
  step_s: float | None = None
  changed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  transport: Transport = Transport(rtts_per_message=1.0)

  def timed(self, config: RunConfig) -> RunConfig:
    """Returns the config of the run that is timed in place of a trained one.

    Example: a run of `tiny` with a low-rank codec of rank 16 is timed as one
    of `qwen_107b` with rank 2048. A run whose codec has no rank gets none.

    Args:
      config: Config of the run that is trained.
    """
    values = flat(config.to_mapping())
    if "model.preset" in self.changed:
      # The other model replaces this one whole, sizes that were set included.
      values |= flat({"model": dataclasses.asdict(ModelConfig())})
    applies = {
      path: value
      for path, value in self.changed.items()
      if not path.startswith("codec.") or values.get(path) is not None
    }
    return from_mapping(run_spec.nested(values | applies))


@dataclasses.dataclass(frozen=True)
class Contest:
  """Methods that are compared in the time that one of them takes.

  Attributes:
    reference: Name of the method whose time is the budget.
    methods: Names of the methods that have this budget.
  """

  reference: str
  methods: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """A convergence sweep.

  Attributes:
    base: Fields of every run, by dotted name.
    methods: The methods in the order of tables.
    tuning: How every method is tuned.
    seeds: Seeds of the results.
    clusters: Clocks by name, in the order of tables.
    target_loss: Loss of which reports say when it is reached (nats a token).
    equal_time: Contests at equal time, by the name of their clock.
    claims: Orderings to look for.
    gaps: Most that a method may be above AllReduce, by its name (share of
      AllReduce's loss).
    notes: Sentences on how to read the report. They are in no digest.
  """

  base: Mapping[str, Any]
  methods: tuple[SweepMethod, ...]
  tuning: Tuning
  seeds: tuple[int, ...]
  clusters: Mapping[str, SweepClock]
  target_loss: float
  equal_time: Mapping[str, Contest]
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
    differ = len(set(self.seeds)) == len(self.seeds)
    require(differ, f"seeds={self.seeds} must differ")
    budgets = {method.name: len(method.refine) for method in self.methods}
    require(
      len(set(budgets.values())) == 1,
      f"every method needs as many settings in refine: {budgets}",
    )
    require(
      bool(self.tuning.inner_learning_rates) or not self.methods[0].refine,
      "refine needs the best of tuning.inner_learning_rates, which are none",
    )
    for method in self.methods:
      with in_front(f"method {method.name!r}: "):
        for setting in ({}, method.given, *method.refine):
          fields = {k: v for k, v in setting.items() if k not in FACTORS}
          self.config({**method.changed, **fields})

  @property
  def tuning_runs(self) -> int:
    """Number of tuning runs of each method."""
    return len(self.tuning.inner_learning_rates) + len(self.methods[0].refine)

  def method(self, name: str) -> SweepMethod:
    """Returns a method by its name."""
    return next(method for method in self.methods if method.name == name)

  def config(self, changed: Mapping[str, Any]) -> RunConfig:
    """Returns the checked config of a run.

    Args:
      changed: Values by dotted field, over the base.

    Raises:
      ValueError: One line that names the field.
    """
    return run_spec.checked_config(self.base, changed)

  def _check_names(self) -> None:
    names = [method.name for method in self.methods]
    if not names or len(set(names)) != len(names):
      raise ValueError(f"methods must be some, each named once: {names}")
    contests = self.equal_time.values()
    for name in (
      *self.gaps,
      *(m.interval_of for m in self.methods if m.interval_of),
      *(name for c in contests for name in (c.reference, *c.methods)),
      *(name for claim in self.claims for name in (claim.better, *claim.than)),
    ):
      known("method", name, names)
    clocks = [method.tau_from for method in self.methods if method.tau_from]
    for name in (*clocks, *self.equal_time):
      known("clock", name, list(self.clusters))
    for claim in self.claims:
      self._check_claim(claim)
    for method in self.methods:
      if method.interval_of and self.method(method.interval_of).interval_of:
        raise ValueError(
          f"method {method.name!r} has the H of {method.interval_of!r}, which"
          " has that of another: name the last one"
        )

  def _check_claim(self, claim: Claim) -> None:
    if claim.at == TOKENS:
      return
    known("clock of equal_time", claim.at, list(self.equal_time))
    for name in (claim.better, *claim.than):
      if name not in self.equal_time[claim.at].methods:
        raise ValueError(
          f"equal_time on {claim.at!r} lacks {name!r}, of which a claim speaks:"
          " add it to its methods"
        )


def check_convergence_field(path: str) -> None:
  """Raises ValueError, with the nearest name, if a sweep lacks a field."""
  fields = [field.name for field in dataclasses.fields(Sweep)]
  run_spec.check_sweep_field(path, fields, ("base",))


def sweep(values: Mapping[str, Any]) -> Sweep:
  """Reads a sweep from a config's plain values.

  Args:
    values: A value for every field of a sweep's config; see
      `experiments/configs/convergence_small.py`.

  Raises:
    ValueError: One line that says what to change.
    KeyError: If a field is missing.
  """
  for name in values:
    check_convergence_field(name)
  contests = values["equal_time"]
  return Sweep(
    # Methods are changes to a base in which every field has a value.
    base=flat(from_mapping(values["base"]).to_mapping()),
    methods=tuple(map(_method, values["methods"])),
    tuning=Tuning(**values["tuning"]),
    seeds=tuple(values["seeds"]),
    clusters={c["name"]: clock_of(c) for c in values["clusters"]},
    target_loss=float(values["target_loss"]),
    equal_time={
      c["clock"]: Contest(c["reference"], c["methods"]) for c in contests
    },
    claims=tuple(Claim(**claim) for claim in values["claims"]),
    gaps=values["gaps"],
    notes=tuple(values["notes"]),
  )


def _method(given: Mapping[str, Any]) -> SweepMethod:
  fields = dict(given)
  name = fields.pop("name")
  refine = tuple(dict(setting) for setting in fields.pop("refine"))
  links = {k: fields.pop(k, "") for k in ("tau_from", "interval_of")}
  given_values = flat(fields.pop("given", {}))
  return SweepMethod(name, flat(fields), refine, **links, given=given_values)


def clock_of(given: Mapping[str, Any]) -> SweepClock:
  """Returns a clock from its entry in a sweep's config (`clusters`)."""
  own = ("name", "cluster", "step_s")
  changed = flat({k: v for k, v in given.items() if k not in own})
  for path in changed:
    check_path(RunConfig, path)
  return SweepClock(given["cluster"], given.get("step_s"), changed)
