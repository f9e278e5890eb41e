"""Says what a run trains, in its log and in its record, before its first step.

Whoever starts a run for hours or days should see at once whether it is the
right one: model, devices, text, method and bytes.
"""

import logging
import math
import pathlib

import jax

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.config import RunConfig
from dilocox_jax.config.platforms import chosen_values
from dilocox_jax.metrics.work_directory import write_run_record
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.report.units import human_bytes, human_tokens
from dilocox_jax.training.build import Programs, platform_name
from dilocox_jax.training.parts import Clock, Parts
from dilocox_jax.training.run_text import RunData


def record(
  config: RunConfig,
  data: RunData,
  parts: Parts,
  clock: Clock | None,
  workdir: pathlib.Path,
  programs: Programs,
  command: str,
  is_resumed: bool,
) -> None:
  """Writes `config.json` and `run.json`.

  Args:
    config: Config of the run.
    data: What the run is trained and evaluated on.
    parts: Parts that the caller handed in.
    clock: Simulated clock of the run, if it has one.
    workdir: The run directory.
    programs: Programs of the run.
    command: Command line that started the run.
    is_resumed: Whether a checkpoint was restored.
  """
  run: dict = {
    "bytes_per_token": data.bytes_per_token,
    "corpus_digest": data.digest,
    "corpus_name": data.name,
    "held_out_digest": data.held_out_digest,
    "method": config.sync.method,
    "num_replicas": config.mesh.num_replicas,
    "parameter_count": programs.parameter_count,
  }
  if parts.names:
    run["handed_in"] = parts.names
  if clock:
    run |= {"clock": clock.description, "clock_digest": clock.digest}
  has_own_model = parts.model is not None
  start = {
    "chosen_for_device": chosen_values(config, platform_name(), has_own_model),
    "command": command,
    "platform": jax.devices()[0].device_kind,
  }
  values = config.to_mapping()
  write_run_record(workdir, values, run, start, is_resumed)


def announce(
  config: RunConfig,
  data: RunData,
  parts: Parts,
  plan: RunPlan,
  traffic: Traffic,
  step: int = 0,
) -> None:
  """Logs what a run trains.

  Args:
    config: Config of the run.
    data: What the run is trained on.
    parts: Parts that the caller handed in.
    plan: Plan in force.
    traffic: Bytes of the present rounds.
    step: Inner steps that an earlier start of the run has done.
  """
  log = logging.getLogger(__name__)
  model = "handed in" if parts.model else config.model.label
  count = sum(math.prod(shape) for shape in traffic.shapes.values())
  what = f"{'adapters of ' if config.lora.rank else ''}{count:,} parameters"
  log.info("model %s: %s, %s", model, what, _where(config))
  kind = "text" if data.text else "data"
  much = human_tokens(data.text.train.size) if data.text else data.says
  total = human_tokens(config.total_steps * data.step_tokens)
  steps = f"{config.total_steps:,} inner steps, {total} a replica"
  log.info("%s %s: %s; %s", kind, data.name, much, steps)
  log.info("method %s", _method(config, plan, traffic))
  if power := config.outer.average_power:
    average = "an average of the parameters (power %g)"
    log.info(f"evaluated and kept: {average}", power)
  if step:
    log.info(
      "going on from step %s of %s", f"{step:,}", f"{config.total_steps:,}"
    )
  log.info("compiling; the first loss comes after it")


def _where(config: RunConfig) -> str:
  """Names the replicas and their devices."""
  replicas = _count(config.mesh.num_replicas, "replica")
  if config.uses_mailbox:
    replicas = f"one of {replicas}, which meet in a store,"
  kind = jax.devices()[0].device_kind
  return f"{replicas} on {_count(config.num_devices, 'device')} ({kind})"


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
