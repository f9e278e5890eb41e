"""Compiles a run for TPU slices that need not exist, and says what it needs.

What is compiled is the program that the trainer runs most often, without any
values.
"""

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.checks import require
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.distributed import host_memory
from dilocox_jax.metrics.lines import write_atomically, write_json
from dilocox_jax.outer.round_states import RoundState
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.report.page import write_page
from dilocox_jax.report.tables import csv_table, markdown_table
from dilocox_jax.report.units import human_bytes, human_share
from dilocox_jax.training import build, states
from experiments.tools.compiled_text import (
  Transfer,
  parse,
  sent_bytes,
  transfers,
)

LIBTPU = "libtpu==0.0.42"
# Memory that a program may use, as the compiler of that version says when a
# program does not fit (GiB), by kind of device.
_MEMORY_GIB = {
  "TPU v4": 30.75,
  "TPU v5": 95.74,
  "TPU v5p": 95.74,
  "TPU v5 lite": 15.75,
  "TPU v6 lite": 31.25,
}
# What libtpu asks a real machine for; the values only stop its questions.
_ENVIRONMENT = {
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-256",
  "TPU_SKIP_MDS_QUERY": "1",
  # Two compilers at once are fine where neither takes a chip.
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Columns of docs/results/compiled_memory.csv, to which a test holds the
# estimate.
COLUMNS = (
  *("run", "machine", "state_bytes", "temporaries_bytes", "needed_bytes"),
  *("peak_bytes", "memory_bytes"),
)


def is_compiler_installed() -> bool:
  """Whether the compiler for TPUs is there."""
  return importlib.util.find_spec("libtpu") is not None


def topology_devices(name: str, num_slices: int) -> list[Any]:
  """Returns the devices of slices that need not exist, slice by slice.

  Args:
    name: Kind and size of a slice, e.g. "v5p:4x4x8".
    num_slices: Number of slices.

  Raises:
    ValueError: If the compiler is missing or knows no such slice.
  """
  if not is_compiler_installed():
    raise ValueError(
      "the compiler for TPUs is not installed: run `make compile-report`, which"
      f" makes an environment with it, or install {LIBTPU!r} into your own"
    )
  for variable, value in _ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  try:
    found = topologies.get_topology_desc(
      name, platform="tpu", num_slices=num_slices
    )
  except Exception as error:  # The compiler raises several kinds.
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ValueError(
      f"--compile={name} with --slices={num_slices} is not known to the "
      f"compiler ({reason[:160]}): take one such as v5e:2x2 or v5p:4x4x8"
    ) from error
  return sorted(found.devices, key=lambda each: (each.slice_index, each.id))


def memory_bytes(device: Any) -> int:
  """Returns the memory of a device that programs may use (bytes).

  Raises:
    ValueError: If it is not known for this kind of device.
  """
  kind = device.device_kind
  if kind not in _MEMORY_GIB:
    raise ValueError(
      f"the memory of {kind!r} is not known: add it to "
      "_MEMORY_GIB in experiments/tools/compiled_run.py"
    )
  return int(_MEMORY_GIB[kind] * 2**30)


class Program(NamedTuple):
  """A window of a run, or a segment of averaged gradients, to be compiled.

  Attributes:
    config: Config of the run.
    num_steps: Inner steps of it.
    planned_bytes: Bytes that one replica sends in it, by the plan.
    kept_bytes: Bytes of the training state that a device keeps beside it: of
      the fragments that no event of the window is about.
    lowered: Its program.
  """

  config: RunConfig
  num_steps: int
  planned_bytes: int
  kept_bytes: int
  lowered: jax.stages.Lowered


def steady_program(
  config: RunConfig, devices: Sequence[Any] | None = None
) -> Program:
  """Lowers a window in which an exchange ends, late enough in a run.

  Of the windows of a round it is the one that sends most.

  Args:
    config: Config of a run, with a mesh of devices.
    devices: Devices to compile for; None: those of this machine.

  Raises:
    ValueError: If the run is too short to have such a window.
  """
  programs = build.programs(config, devices=devices)
  segment, traffic = _steady_segment(config), to_plan.traffic(config)
  sizes = config.data.batch_size, config.data.sequence_length + 1
  shape = config.mesh.num_replicas, segment.num_steps, *sizes
  batches = jax.ShapeDtypeStruct(shape, np.int32)
  if segment.windows:
    step, window = _fullest(segment, traffic)
    counts = config.sync.named.schedule.num_in_flight(step)
    state = states.abstract(programs, segment.phase, in_flight=counts)
    assert isinstance(state, RoundState)
    lowered = programs.rounds.lowered(state, batches, window)
    kept = _kept_bytes(state, window)
    segment = dataclasses.replace(
      segment, num_steps=window.num_steps, windows=(window,)
    )
  else:
    state, kept = states.abstract(programs, segment.phase), 0
    place = programs.steps.replicas.batch_sharding
    batches = batches.update(sharding=place)
    lowered = programs.steps.compiled.lower(state, batches)
  sent = traffic.segment_bytes(segment)
  return Program(config, segment.num_steps, sent, kept, lowered)


def _fullest(segment: Segment, traffic: Traffic) -> tuple[int, Window]:
  """Returns the window that sends most, and the schedule's step before it."""
  done = segment.start - segment.schedule_start
  counts = itertools.accumulate(
    (window.num_steps for window in segment.windows), initial=done
  )
  found = zip(counts, segment.windows, strict=False)
  arriving = [(step, window) for step, window in found if window.applied]

  def size(each: tuple[int, Window]) -> tuple[int, bool]:
    window = each[1]
    assert window.applied
    return traffic.exchange_bytes(window.applied.fragment), bool(window.sent)

  return max(arriving, key=size)


def _kept_bytes(state: RoundState, window: Window) -> int:
  """Returns the bytes on a device of fragments that a window leaves alone."""
  events = window.applied, window.sent
  own = {event.fragment for event in events if event}
  others = [f for p, f in enumerate(state.fragments) if p not in own]
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(others)
    if leaf.sharding.memory_kind != host_memory.HOST
  )


def _steady_segment(config: RunConfig) -> Segment:
  plan = to_plan.run_plan(config)
  schedule = config.sync.named.schedule
  start = plan.local_start
  if plan.method.exchanged == "gradient":
    return plan.segment(0)
  step = start + (schedule.depth + 1) * schedule.sync_interval
  if step + schedule.sync_interval > plan.total_steps:
    raise ValueError(
      f"total_steps={plan.total_steps} ends before everything that is sent in "
      f"one round arrives in another: take at least "
      f"{step + schedule.sync_interval}"
    )
  return plan.segment(step)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of one device, for one window of a run.

  Attributes:
    name: Method and model.
    machine: The slices, e.g. "2 x v5p:4x4x8".
    memory_bytes: Memory of a device.
    compile_s: Seconds that the compiler took.
    num_steps: Inner steps of the window.
    state_bytes: What the program is given, and what lies beside it.
    temporaries_bytes: What it needs while it runs.
    needed_bytes: Memory that the run needs.
    peak_bytes: Most memory that the program uses at one time, as the compiler
      counts it. It is less than what is needed, since there is room between
      arrays.
    sent_bytes: Bytes that go to other slices.
    planned_bytes: The same by the plan.
    transfers: Transfers between slices, in the order of the program.
  """

  name: str
  machine: str
  memory_bytes: int
  compile_s: float
  num_steps: int
  state_bytes: int
  temporaries_bytes: int
  needed_bytes: int
  peak_bytes: int
  sent_bytes: float
  planned_bytes: float
  transfers: list[Transfer]

  @property
  def fits(self) -> bool:
    """Whether the program fits into a device."""
    return self.needed_bytes <= self.memory_bytes

  @property
  def finding(self) -> str:
    """Whether the run fits, and what is hidden, in one sentence each."""
    spare = 1 - self.needed_bytes / self.memory_bytes
    fit = f"fits with {human_share(spare)} to spare"
    if not self.fits:
      fit = f"does NOT fit: it lacks {human_share(-spare)} of a device's memory"
    hidden = sum(bool(each.hidden_by) for each in self.transfers)
    return (
      f"A window of {self.num_steps} inner steps {fit} on {self.machine}."
      f" {hidden} of {len(self.transfers)} transfers between slices start"
      " before inner steps and end after them. Nothing was run: all numbers are"
      f" the compiler's, which took {self.compile_s:.0f} s."
    )


def compiled_run(config: RunConfig, topology: str, num_slices: int) -> Compiled:
  """Compiles a run for slices that need not exist.

  Args:
    config: Config of the run.
    topology: Kind and size of a slice, e.g. "v5p:4x4x8".
    num_slices: Number of slices.

  Raises:
    ValueError: One line that says what is wrong, e.g. that the compiler found
      no way to fit the program into a chip.
  """
  devices = topology_devices(topology, num_slices)
  needed = config.mesh.num_replicas * config.division.num_devices
  require(
    needed == len(devices),
    f"the run has {needed} devices and the slices have {len(devices)}:"
    " num_replicas x num_data_shards x num_stages must be all of them, e.g."
    " --config.mesh.num_stages=2 --config.mesh.num_data_shards=2 for v5e:2x2",
  )
  program = steady_program(config, devices)
  start = time.perf_counter()
  try:
    compiled = program.lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    reason = str(error).strip().splitlines()[0]
    raise ValueError(
      f"the program does not fit into a chip ({reason[:200]}): take more stages"
      " or data shards, a smaller batch or rank, or mesh.remat='full'"
    ) from error
  seconds = time.perf_counter() - start
  machine = f"{num_slices} x {topology}"
  return analyse(program, compiled, machine, memory_bytes(devices[0]), seconds)


def analyse(
  program: Program,
  compiled: jax.stages.Compiled,
  machine: str = "",
  device_bytes: int = 0,
  compile_s: float = 0.0,
) -> Compiled:
  """Reads memory, transfers and their order from a compiled program."""
  config = program.config
  sizes: Any = compiled.memory_analysis()
  module = parse(compiled.as_text() or "")
  state = sizes.argument_size_in_bytes + program.kept_bytes
  # What is given may be reused for what is returned.
  returned = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  beside = sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes
  return Compiled(
    f"{config.sync.method}, {config.model.preset or 'own model'}",
    machine,
    device_bytes,
    compile_s,
    program.num_steps,
    state,
    sizes.temp_size_in_bytes,
    state + returned + beside,
    sizes.peak_memory_in_bytes,
    sent_bytes(module, config.mesh.num_replicas),
    program.planned_bytes / config.division.num_devices,
    transfers(module),
  )


def write_compiled(
  compiled: Compiled, workdir: pathlib.Path, command: str
) -> pathlib.Path:
  """Writes `report.md` and `compiled.json`; returns the path of the page.

  Args:
    compiled: What was compiled.
    workdir: Directory to write into.
    command: Command line that made it.
  """
  values = dataclasses.asdict(compiled)
  write_json(workdir / "compiled.json", values | {"fits": compiled.fits})
  rows = [
    (name.removesuffix("_bytes"), human_bytes(round(size)))
    for name, size in values.items()
    if name.endswith("_bytes")
  ]
  moved = [
    (
      *(each.kind, human_bytes(each.operand_bytes), each.start, each.end),
      " ".join(map(str, each.hidden_by)) or "none",
    )
    for each in compiled.transfers
  ]
  header = ("kind", "operand", "starts at", "ends at", "inner steps between at")
  lines = [
    *(compiled.finding, "", "## Memory of a device, and its bytes", ""),
    *markdown_table(("what", "size"), rows),
    *("", "## Transfers between slices", "", *markdown_table(header, moved)),
  ]
  title = f"{compiled.name}, compiled for {compiled.machine}"
  return write_page(workdir, title, lines, command)


def write_table(reports: pathlib.Path, table: pathlib.Path) -> None:
  """Writes a CSV of the memory of all reports.

  Args:
    reports: Directory with one directory for every run, of its name.
    table: CSV file to write.
  """
  rows = []
  for path in sorted(reports.glob("*/compiled.json")):
    found = json.loads(path.read_text()) | {"run": path.parent.name}
    rows.append({column: found[column] for column in COLUMNS})
  write_atomically(table, csv_table(rows))
