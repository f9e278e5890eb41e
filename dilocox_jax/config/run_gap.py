"""Predicts how far a run's loss ends above AllReduce's, from its config."""

import dataclasses

from dilocox_jax.config.run import RunConfig
from dilocox_jax.gap.expected import ExpectedGap, expected_gap
from dilocox_jax.gap.law import Estimate
from dilocox_jax.plan.schedule.methods import method_parts

_WARM_START = (
  "A data-parallel start lowers the gap (by two fifths if it takes a sixth of"
  " the steps); the range does not count it."
)


def run_gap(config: RunConfig, gain: Estimate) -> ExpectedGap | None:
  """Predicts the gap of a run: its loss divided by AllReduce's, minus 1.

  Args:
    config: Config of the run.
    gain: s, the share by which AllReduce's loss falls if its batch doubles. The
      doubled batch has as many sequences as all replicas of the run together
      take in a step.

  Returns:
    The expected gap. None for one replica, and for a method that averages
    gradients at every step.
  """
  method = config.sync.named
  if config.mesh.num_replicas < 2 or method.exchanged == "gradient":
    return None
  name, _ = method_parts(config.sync.method)
  found = expected_gap(
    num_replicas=config.mesh.num_replicas,
    sync_interval=method.schedule.sync_interval,
    method=name,
    steps=config.total_steps,
    gain=gain,
  )
  if config.sync.warm_start_steps:
    notes = (*found.notes, _WARM_START)
    found = dataclasses.replace(found, notes=notes)
  return found
