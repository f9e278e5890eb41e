"""What a run will do and send, from its config, without JAX.

The trainer and the simulator both read the plan that is made here, so they
cannot have two ideas of one run.
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

# Room that ranks by leaf have in states: this times the first rank.
ROOM_BY_LEAF = 2


def policy(config: RunConfig) -> Policy:
  """How rank and H are chosen on the way; the first setting is the config's."""
  found = low_rank_of(config.codec.payload)
  interval = config.sync.named.schedule.sync_interval
  return Policy(
    RoundSetting(found.rank if found else 0, interval),
    config.adaptive.window_rounds,
    config.adaptive.mode == "rank_and_interval",
  )


def payload(config: RunConfig, setting: RoundSetting | None = None) -> Payload:
  """What travels, with the config's own ranks or chosen ones."""
  own = config.codec.payload
  return with_ranks(own, setting) if setting else own


def method(config: RunConfig, setting: RoundSetting | None = None) -> Method:
  """The method, with its own H or a chosen one."""
  named = config.sync.named
  if setting is None or setting.sync_interval == named.schedule.sync_interval:
    return named
  return with_interval(named, setting.sync_interval)


def run_plan(config: RunConfig, setting: RoundSetting | None = None) -> RunPlan:
  """What the run does when."""
  sync = config.sync
  return RunPlan(
    method(config, setting),
    config.total_steps,
    sync.warm_start,
    sync.warm_start_steps,
    sync.steps_per_dispatch,
  )


def traffic(config: RunConfig, setting: RoundSetting | None = None) -> Traffic:
  """What the run puts on the wire."""
  return Traffic(
    method(config, setting),
    config.fragments,
    parameter_shapes(config.model.shape),
    config.mesh.num_replicas,
    payload(config, setting),
    config.exchange.collective,
  )
