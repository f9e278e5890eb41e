"""Makes the plan of a run from its config.

The trainer and the simulator both read the plan that this file makes. So the
simulator prices exactly the run that is trained.

Some functions take a `RoundSetting`, the rank and H that an adaptive run has
chosen. Without a setting they use the rank and H of the config.
"""

from dilocox_jax.aggregators.collectives import Traffic
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.low_rank import LowRank, with_rank
from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import MembershipConfig
from dilocox_jax.plan.adaptive import Policy, RoundSetting
from dilocox_jax.plan.schedule.fragments import Shapes
from dilocox_jax.plan.schedule.methods import Method, with_interval
from dilocox_jax.plan.schedule.run_plan import RunPlan


def policy(config: RunConfig) -> Policy:
  """Returns the policy that chooses rank and H, starting from the config's."""
  codec = config.exchange.named_codec
  rank = codec.rank if isinstance(codec, LowRank) else 0
  interval = config.sync.named.schedule.sync_interval
  return Policy(
    RoundSetting(rank, interval),
    config.adaptive.window_rounds,
    config.adaptive.mode == "rank_and_interval",
  )


def codec(config: RunConfig, setting: RoundSetting | None = None) -> Codec:
  """Returns the codec of an exchange, with the rank of the setting.

  Where the rank changes during a run, states have room for the first one, which
  is the largest.

  Args:
    config: Config of the run.
    setting: Rank and H of some rounds; None: the first ones.
  """
  named = config.exchange.named_codec
  if config.adaptive.mode == "off":
    return named
  first = policy(config).first.rank
  return with_rank(named, setting.rank if setting else first, first)


def method(config: RunConfig, setting: RoundSetting | None = None) -> Method:
  """Returns the method of the run, with the H of the setting.

  Args:
    config: Config of the run.
    setting: Rank and H of some rounds; None: those of the config.
  """
  first = config.sync.named
  if setting is None or setting.sync_interval == first.schedule.sync_interval:
    return first
  return with_interval(first, setting.sync_interval)


def run_plan(config: RunConfig, setting: RoundSetting | None = None) -> RunPlan:
  """Returns the plan of the run's segments.

  Args:
    config: Config of the run.
    setting: Rank and H of the rounds; None takes those of the config.
  """
  sync, chosen = config.sync, method(config, setting)
  members = None
  if config.membership != MembershipConfig():
    count, seed = config.mesh.num_replicas, config.seed
    members = config.membership.plan(chosen, count, seed)
  return RunPlan(
    chosen,
    config.total_steps,
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
    shapes: Shape of every parameter by path; None takes those of the config.
  """
  return Traffic(
    method(config, setting),
    config.fragments,
    shapes or config.trained_shapes,
    config.mesh.num_replicas,
    codec(config, setting),
    config.exchange.collective,
    not config.meets and config.exchange.max_norm_ratio is not None,
  )
