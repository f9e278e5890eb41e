"""Makes the plan of a run from its config, without JAX.

The trainer and the simulator both read the plan that this file makes. So the
simulator prices exactly the run that is trained.

Some functions take a `RoundSetting`, the rank and H that an adaptive run has
chosen. Without a setting they use the rank and H of the config.
"""

from dilocox_jax.config import RunConfig
from dilocox_jax.config.membership import MembershipConfig
from dilocox_jax.plan.model.shapes import parameter_shapes
from dilocox_jax.plan.schedule.membership import Absences
from dilocox_jax.plan.schedule.methods import Method, with_interval
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.plan.wire.adaptive import (
  Policy,
  RoundSetting,
  low_rank_of,
  with_rank,
)
from dilocox_jax.plan.wire.leaf import Shapes
from dilocox_jax.plan.wire.payload import Payload
from dilocox_jax.plan.wire.traffic import Traffic


def policy(config: RunConfig) -> Policy:
  """Returns the policy that chooses rank and H, starting from the config's."""
  low_rank = low_rank_of(config.codec.payload)
  interval = config.sync.named.schedule.sync_interval
  return Policy(
    RoundSetting(low_rank.rank if low_rank else 0, interval),
    config.adaptive.window_rounds,
    config.adaptive.mode == "rank_and_interval",
  )


def payload(config: RunConfig, setting: RoundSetting | None = None) -> Payload:
  """Returns the payload of an exchange, with the rank of the setting."""
  first = config.codec.payload
  return with_rank(first, setting.rank) if setting else first


def method(config: RunConfig, setting: RoundSetting | None = None) -> Method:
  """Returns the method of the run, with the H of the setting."""
  first = config.sync.named
  if setting is None or setting.sync_interval == first.schedule.sync_interval:
    return first
  return with_interval(first, setting.sync_interval)


def run_plan(
  config: RunConfig, setting: RoundSetting | None = None, joined: Absences = ()
) -> RunPlan:
  """Returns the plan of the run's segments.

  Args:
    config: Config of the run.
    setting: Rank and H of the rounds; None takes those of the config.
    joined: Replicas that the run did not have at first, as absences.
  """
  sync, chosen = config.sync, method(config, setting)
  members = None
  if joined or config.membership != MembershipConfig():
    count, seed = config.mesh.num_replicas, config.seed
    members = config.membership.plan(chosen, count, seed, joined)
  return RunPlan(
    chosen,
    config.total_steps,
    sync.warm_start,
    sync.warm_start_steps,
    sync.steps_per_dispatch,
    membership=members,
  )


def traffic(
  config: RunConfig,
  setting: RoundSetting | None = None,
  shapes: Shapes | None = None,
) -> Traffic:
  """Returns the object that counts the bytes one replica sends.

  Args:
    config: Config of the run.
    setting: Rank and H of the rounds; None takes those of the config.
    shapes: Shape of every parameter by path; None takes those of the config's
      model.
  """
  return Traffic(
    method(config, setting),
    config.fragments,
    shapes or parameter_shapes(config.model.shape),
    config.mesh.num_replicas,
    payload(config, setting),
    config.exchange.collective,
    config.exchange.kind,
  )
