"""The plan of a run, made from its config without JAX.

The trainer and the simulator both read the plan that is made here, so what is
simulated is what is trained.
"""

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.model.shapes import parameter_shapes
from dilocox_jax.plan.schedule.methods import Method, with_interval
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.plan.wire.adaptive import (
  Policy,
  RoundSetting,
  low_rank_of,
  with_ranks,
)
from dilocox_jax.plan.wire.payload import Payload
from dilocox_jax.plan.wire.traffic import Traffic

# States have room for this times the first rank where leaves differ in rank.
ROOM_BY_LEAF = 2


def policy(config: RunConfig) -> Policy:
  """Returns how rank and H follow measurements, beginning with the config's."""
  low_rank = low_rank_of(config.codec.payload)
  interval = config.sync.named.schedule.sync_interval
  return Policy(
    RoundSetting(low_rank.rank if low_rank else 0, interval),
    config.adaptive.window_rounds,
    config.adaptive.mode == "rank_and_interval",
  )


def payload(config: RunConfig, setting: RoundSetting | None = None) -> Payload:
  """Returns the payload, with the ranks of a setting if one is given."""
  sent = config.codec.payload
  return with_ranks(sent, setting) if setting else sent


def method(config: RunConfig, setting: RoundSetting | None = None) -> Method:
  """Returns the method, with the H of a setting if one is given."""
  named = config.sync.named
  if setting is None or setting.sync_interval == named.schedule.sync_interval:
    return named
  return with_interval(named, setting.sync_interval)


def run_plan(config: RunConfig, setting: RoundSetting | None = None) -> RunPlan:
  """Returns the segments of the run, with the H of a setting if given."""
  sync = config.sync
  return RunPlan(
    method(config, setting),
    config.total_steps,
    sync.warm_start,
    sync.warm_start_steps,
    sync.steps_per_dispatch,
  )


def traffic(config: RunConfig, setting: RoundSetting | None = None) -> Traffic:
  """Returns the bytes that the run sends, at a setting if one is given."""
  return Traffic(
    method(config, setting),
    config.fragments,
    parameter_shapes(config.model.shape),
    config.mesh.num_replicas,
    payload(config, setting),
    config.exchange.collective,
  )
