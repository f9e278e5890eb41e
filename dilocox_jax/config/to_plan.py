"""Builds a run's plan, codec and traffic (the sent bytes) from its config.

The trainer and the simulator use the same functions, so the simulator times the
plan that is trained. If the rank of a codec or H (the inner steps of a round)
adapts during the run (`training.adaptive_controller`), the results have the
rank and H of the first rounds.
"""

import dataclasses

from dilocox_jax.aggregators.collective import Collective
from dilocox_jax.aggregators.mailbox_mean import MailboxMean
from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import MembershipConfig
from dilocox_jax.plan.adaptive import Policy, RoundSetting
from dilocox_jax.plan.schedule.fragments import Shapes
from dilocox_jax.plan.schedule.run_plan import RunPlan


def policy(config: RunConfig) -> Policy:
  """Returns the object that chooses the rank and H during an adaptive run.

  A codec without a low rank counts as rank 0.
  """
  codec = config.exchange.named_codec
  rank = 0
  if isinstance(codec, LowRank):
    rank = codec.rank
  sync_interval = config.sync.named.schedule.sync_interval
  return Policy(
    first=RoundSetting(rank, sync_interval),
    mode=config.adaptive.mode,
    window_rounds=config.adaptive.window_rounds,
    energy=config.adaptive.energy,
  )


def codec(config: RunConfig) -> Codec:
  """Returns the codec with which a run begins.

  If the low rank adapts, the codec's state has room for the first rank, which
  is the largest.
  """
  named = config.exchange.named_codec
  if config.adaptive.mode == "off" or not isinstance(named, LowRank):
    return named
  return dataclasses.replace(named, max_rank=named.rank)


def run_plan(config: RunConfig) -> RunPlan:
  """Returns the plan of a run: its rounds, and the replicas in each of them."""
  method = config.sync.named
  membership = None
  if config.membership != MembershipConfig():
    membership = config.membership.plan(
      method, num_replicas=config.mesh.num_replicas, seed=config.seed
    )
  return RunPlan(
    method=method,
    total_steps=config.total_steps,
    warm_start_steps=config.sync.warm_start_steps,
    steps_per_dispatch=config.sync.steps_per_dispatch,
    membership=membership,
  )


def _collective(config: RunConfig) -> str | Collective:
  """Returns the config's collective: a name, or an object for a mailbox."""
  if config.uses_mailbox:
    return MailboxMean(config.mailbox.shares)
  return config.exchange.collective


def traffic(config: RunConfig, shapes: Shapes | None = None) -> Traffic:
  """Returns an object that computes the bytes that one replica sends.

  Args:
    config: Config of the run.
    shapes: Shapes of the exchanged parameters by path; None: the trained
      parameters of the config's model.
  """
  exchange = config.exchange
  if shapes is None:
    shapes = config.trained_shapes
  # With a mailbox the norms are in the messages, so they take no bytes of
  # their own.
  compares_norms = (
    exchange.max_norm_ratio is not None and not config.uses_mailbox
  )
  return Traffic(
    method=config.sync.named,
    fragments=config.fragments,
    shapes=shapes,
    num_replicas=config.mesh.num_replicas,
    codec=codec(config),
    collective=_collective(config),
    compares_norms=compares_norms,
  )
