"""Simulated times of committed runs, and of the runs of the quick start."""

from dilocox_jax.config import RunConfig
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.transfer import NCCL
from experiments.configs import convergence
from experiments.sweeps.clocks import SweepClock, clock_of

# Messages of this clock do not wait for a round trip each.
IN_PIECES = SweepClock(
  "1gbit", clock_of(convergence.CLOCKS[0]).step_s, transport=NCCL
)
OF_107B = clock_of(convergence.CLOCK_107B)


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
