"""Says in a few lines what a run trains, before its first step.

Whoever starts a run for hours or days should see at once whether it is the
right one: model, devices, text, method, bytes and, with a clock, time.
"""

import logging
import math
from collections.abc import Sequence

import jax

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.config import RunConfig
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.report.units import human_bytes, human_tokens
from dilocox_jax.training.clock import Clock
from dilocox_jax.training.run_text import RunData


def announce(
  config: RunConfig,
  data: RunData,
  plan: RunPlan,
  traffic: Traffic,
  handed_in: Sequence[str],
  clock: Clock | None,
  step: int,
) -> None:
  """Logs what a run trains.

  Args:
    config: Config of the run.
    data: What the run is trained on.
    plan: Plan in force.
    traffic: Bytes of the present rounds.
    handed_in: Names of the parts that the caller handed in.
    clock: Simulated clock of the run, if it has one.
    step: Inner steps finished.
  """
  log = logging.getLogger(__name__)
  for line in summary_lines(config, data, plan, traffic, handed_in):
    log.info(line)
  if clock:
    hours = clock_at_end_s(clock, plan, traffic, step) / 3600
    log.info("simulated time: %.3g h, %s", hours, clock.description)


def summary_lines(
  config: RunConfig,
  data: RunData,
  plan: RunPlan,
  traffic: Traffic,
  handed_in: Sequence[str] = (),
) -> list[str]:
  """Describes a run in three lines, and its average in a fourth.

  Args:
    config: Config of the run.
    data: What the run is trained on.
    plan: Plan in force at the start.
    traffic: Bytes of the rounds at the start.
    handed_in: Names of the parts that the caller handed in.
  """
  mesh, device = config.mesh, jax.devices()[0].device_kind
  is_stacked = mesh.layout == "stacked"
  num_devices = (
    1 if is_stacked else config.num_local_replicas * config.division.num_devices
  )
  replicas = _count(mesh.num_replicas, "replica")
  if config.meets:
    replicas = f"one of {replicas}, which meet in a store,"
  tokens = config.total_steps * data.step_tokens
  count = sum(math.prod(shape) for shape in traffic.shapes.values())
  name = "handed in" if "model" in handed_in else config.model.preset
  power = config.outer.average_power
  average = (
    f"evaluated and kept: an average of the parameters (power {power:g})"
  )
  return [
    f"model {name}: {count:,} parameters, "
    f"{replicas} on {_count(num_devices, 'device')} ({device})",
    f"{'text' if data.text else 'data'} {data.name}: {data.says}; "
    f"{config.total_steps:,} inner steps, {human_tokens(tokens)} a replica",
    f"method {_method(config, plan, traffic)}",
    *([average] if power else []),
  ]


def _count(number: int, noun: str) -> str:
  return f"{number} {noun}{'s' * (number != 1)}"


def _method(config: RunConfig, plan: RunPlan, traffic: Traffic) -> str:
  """Names the method, its schedule and codec, and the bytes that it sends."""
  method, codec = plan.method, config.exchange.codec
  if method.exchanged == "gradient":
    sent = human_bytes(traffic.gradient_bytes())
    return f"{config.sync.method}: codec {codec}, a replica sends {sent} a step"
  schedule = method.schedule
  fragments = range(schedule.num_fragments)
  sent = human_bytes(sum(traffic.exchange_bytes(p) for p in fragments))
  return (
    f"{config.sync.method}: H = {schedule.sync_interval}, "
    f"P = {schedule.num_fragments}, tau = {schedule.overlap_steps}, "
    f"codec {codec}, a replica sends {sent} a round"
  )


def clock_at_end_s(
  clock: Clock, plan: RunPlan, traffic: Traffic, step: int = 0
) -> float:
  """Returns the simulated seconds at the end of a run, if its setting stays.

  Args:
    clock: Simulated clock of the run; its state is left as it was.
    plan: Plan in force.
    traffic: Bytes of the present setting.
    step: Inner steps finished.
  """
  state = clock.get_state()
  for segment in plan.segments(step):
    clock.advance(segment, traffic)
  seconds = clock.finish(plan, traffic)
  clock.set_state(state)
  return seconds
