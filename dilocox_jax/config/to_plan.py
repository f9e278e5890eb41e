"""Makes the plan of a run from its config.

The trainer and the simulator both read the plan that this file makes. So the
simulator prices exactly the run that is trained.

An adaptive run changes the rank and H of these objects later on, without the
config (`training.adaptive_controller`).
"""

import dataclasses

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import MembershipConfig
from dilocox_jax.plan.adaptive import Policy, RoundSetting
from dilocox_jax.plan.schedule.fragments import Shapes
from dilocox_jax.plan.schedule.run_plan import RunPlan


def policy(config: RunConfig) -> Policy:
  """Returns the policy that chooses rank and H, starting from the config's."""
  codec = config.exchange.named_codec
  rank = codec.rank if isinstance(codec, LowRank) else 0
  interval = config.sync.named.schedule.sync_interval
  return Policy(RoundSetting(rank, interval), **vars(config.adaptive))


def codec(config: RunConfig) -> Codec:
  """Returns the codec of the first exchange.

  Where the rank changes during a run, states have room for the first one, which
  is the largest.
  """
  named = config.exchange.named_codec
  if config.adaptive.mode == "off" or not isinstance(named, LowRank):
    return named
  return dataclasses.replace(named, max_rank=named.rank)


def run_plan(config: RunConfig) -> RunPlan:
  """Returns the plan of the run's segments."""
  sync, method = config.sync, config.sync.named
  members = None
  if config.membership != MembershipConfig():
    count, seed = config.mesh.num_replicas, config.seed
    members = config.membership.plan(method, count, seed)
  return RunPlan(
    method,
    config.total_steps,
    sync.warm_start_steps,
    sync.steps_per_dispatch,
    membership=members,
  )


def traffic(config: RunConfig, shapes: Shapes | None = None) -> Traffic:
  """Returns the object that counts the bytes one replica sends.

  Args:
    config: Config of the run.
    shapes: Shape of every parameter by path; None takes those of the config.
  """
  exchange = config.exchange
  # Replicas that meet in a store compare norms by what their messages say.
  compares_norms = (
    exchange.max_norm_ratio is not None and not config.uses_mailbox
  )
  return Traffic(
    method=config.sync.named,
    fragments=config.fragments,
    shapes=config.trained_shapes if shapes is None else shapes,
    num_replicas=config.mesh.num_replicas,
    codec=codec(config),
    collective=exchange.collective,
    compares_norms=compares_norms,
  )
