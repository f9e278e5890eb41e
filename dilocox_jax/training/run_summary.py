"""Logs and records the model, data and method of a run before it trains.

So a user sees at once whether a run of hours or days is the one that was meant.
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
from dilocox_jax.training.overrides import Overrides
from dilocox_jax.training.run_clock import Clock
from dilocox_jax.training.run_text import RunData


def record(
  config: RunConfig,
  data: RunData,
  overrides: Overrides,
  clock: Clock | None,
  workdir: pathlib.Path,
  programs: Programs,
  command: str,
  is_resumed: bool,
) -> None:
  """Writes `config.json` and `run.json` into the run directory.

  `config.json` has the whole config. `run.json` has the digests of the data,
  the size of the model, the command, and the versions of packages. If the run
  continues (`is_resumed`), `run.json` also lists the earlier starts that differ
  from this one, for example in the command.
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
  if overrides.names:
    run["overrides"] = overrides.names
  if clock:
    run |= {"clock": clock.description, "clock_digest": clock.digest}
  has_own_model = overrides.model is not None
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
  overrides: Overrides,
  plan: RunPlan,
  traffic: Traffic,
  step: int = 0,
) -> None:
  """Logs model, devices, data and method of a run, before it trains.

  If the run continues, `step` is its number of finished inner steps.
  """
  log = logging.getLogger(__name__)
  model = config.model.label
  if overrides.model:
    model = "passed in"
  num_parameters = sum(math.prod(shape) for shape in traffic.shapes.values())
  size = f"{num_parameters:,} parameters"
  if config.lora.rank:
    size = f"adapters of {size}"
  log.info("model %s: %s, %s", model, size, _replicas_and_devices(config))
  if data.text:
    kind = "text"
    data_size = human_tokens(data.text.train.size)
  else:
    kind = "data"
    data_size = data.description
  replica_tokens = human_tokens(config.total_steps * data.step_tokens)
  log.info(
    "%s %s: %s; %s inner steps, %s a replica",
    kind,
    data.name,
    data_size,
    f"{config.total_steps:,}",
    replica_tokens,
  )
  log.info("method %s", _method_and_bytes(config, plan, traffic))
  power = config.outer.average_power
  if power:
    log.info(
      "evaluated and kept: an average of the parameters (power %g)", power
    )
  if step:
    log.info(
      "going on from step %s of %s", f"{step:,}", f"{config.total_steps:,}"
    )
  log.info("compiling; the first loss comes after it")


def _replicas_and_devices(config: RunConfig) -> str:
  """Names the replicas and their devices: "2 replicas on 1 device (cpu)"."""
  replicas = _with_plural(config.mesh.num_replicas, "replica")
  if config.uses_mailbox:
    replicas = f"one of {replicas}, which meet in a store,"
  devices = _with_plural(config.num_devices, "device")
  kind = jax.devices()[0].device_kind
  return f"{replicas} on {devices} ({kind})"


def _with_plural(number: int, noun: str) -> str:
  """Returns a number with a noun, e.g. "1 device" or "2 devices"."""
  if number == 1:
    return f"{number} {noun}"
  return f"{number} {noun}s"


def _method_and_bytes(
  config: RunConfig, plan: RunPlan, traffic: Traffic
) -> str:
  """Names method and codec, and what a replica sends in a round (or step)."""
  method = plan.method
  codec = config.exchange.codec
  if method.exchanged == "gradient":
    sent = human_bytes(traffic.gradient_bytes())
    return f"{config.sync.method}: codec {codec}, a replica sends {sent} a step"
  schedule = method.schedule
  round_bytes = sum(
    traffic.exchange_bytes(fragment)
    for fragment in range(schedule.num_fragments)
  )
  sent = human_bytes(round_bytes)
  return (
    f"{config.sync.method}: H = {schedule.interval_label}, "
    f"P = {schedule.num_fragments}, tau = {schedule.overlap_steps}, "
    f"codec {codec}, a replica sends {sent} a round"
  )
