"""Simulated times of committed runs, and of the runs of the quick start."""

from collections.abc import Sequence

from dilocox_jax.config import RunConfig
from dilocox_jax.report.frame import Setting
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.transfer import NCCL
from experiments.configs import convergence
from experiments.sweeps import page
from experiments.sweeps.clocks import SweepClock, clock_of
from experiments.sweeps.rows import Rows
from experiments.sweeps.runs import runs_of
from tests.docs.committed_runs import ROOT

# Messages of the first wait for a round trip each, those of the second do not.
WHOLE_MESSAGES = clock_of(convergence.CLOCKS[0])
IN_PIECES = SweepClock("1gbit", WHOLE_MESSAGES.step_s, transport=NCCL)
OF_107B = clock_of(convergence.CLOCK_107B)
# Methods of the README's figure, each with its baseline.
BASELINES = {
  "muloco": "allreduce_muon",
  "overlap_loco": "allreduce_muon_average",
}


def seconds(clock: SweepClock, config: RunConfig) -> float:
  """Returns the simulated time of a run (s)."""
  return clock.times(config).end_s


def over_steps_alone(config: RunConfig) -> float:
  """Returns a run's time over that of its steps, on the clock of 107B."""
  steps_s = config.total_steps * OF_107B.step_s_of(config)
  return seconds(OF_107B, config) / steps_s


def sent_bytes(config: RunConfig) -> int:
  """Returns the bytes that a replica sends in a run (derived)."""
  setup = IN_PIECES._setup(config)
  return run_time(
    setup.link_costs, setup.work, setup.script.ops(setup.plan)
  ).sent_bytes


def times_sooner(clock: SweepClock, target: float) -> dict[str, list[float]]:
  """Returns how many times sooner than AllReduce a loss is reached.

  Args:
    clock: What times the runs of the figure of the README.
    target: The loss (nats a token).

  Returns:
    The ratio of each seed that both have, by method.
  """
  reached_s = {
    setting.name: dict(
      zip(
        [seed_run.seed for seed_run in setting.seed_runs if seed_run.points],
        setting.seconds_to("clock", target),
        strict=True,
      )
    )
    for setting in curves(clock)
  }
  ratios = {}
  for name, base in BASELINES.items():
    seeds = sorted(reached_s[name].keys() & reached_s[base].keys())
    ratios[name] = [
      reached_s[base][seed] / reached_s[name][seed] for seed in seeds
    ]
  return ratios


def curves(clock: SweepClock) -> Sequence[Setting]:
  """Returns the settings of the figure of the README, timed by a clock."""
  sweep = convergence.get_config("small").to_dict()
  rows = Rows(ROOT / sweep["rows"])
  names = {*BASELINES, *BASELINES.values()}
  given = [(name, values) for name, values in rows.settings if name in names]
  runs = runs_of(sweep, given)
  chosen = [row for row in rows.runs.values() if row.name in names]
  times = page.times_of(runs, {"clock": clock})
  frame = page.frame(sweep, runs, chosen, rows, {"clock": clock}, times)
  return frame.settings
