"""Compiles a run for TPU slices that need not exist, and says what it needs.

What is compiled is the program that the trainer runs most often, without any
values. Memory is the compiler's own count. What is sent between slices is read
from the text of the program (`compiled_transfers`).
"""

import dataclasses
import importlib.util
import itertools
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from dilocox_jax.checks import require
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.distributed import host_memory
from dilocox_jax.metrics.lines import write_json
from dilocox_jax.models import adapters
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.report.page import write_page
from dilocox_jax.report.tables import markdown_table
from dilocox_jax.report.units import human_bytes, human_share
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training import build, states
from dilocox_jax.training.parts import NO_PARTS, Parts
from dilocox_jax.trees import nested
from experiments.tools.compiled_transfers import Transfer, transfers

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
  # Devices of a lone slice do not say which it is.
  return sorted(
    found.devices, key=lambda each: (getattr(each, "slice_index", 0), each.id)
  )


class Program(NamedTuple):
  """A window of a run, or a segment of averaged gradients, to be compiled.

  Attributes:
    num_steps: Inner steps of it.
    planned_bytes: Bytes that one replica sends in it, by the plan.
    kept_bytes: Bytes of the training state that a device keeps beside it: of
      the fragments that no event of the window is about.
    lowered: Its program.
  """

  num_steps: int
  planned_bytes: int
  kept_bytes: int
  lowered: jax.stages.Lowered


def steady_program(
  config: RunConfig, devices: Sequence[Any] | None = None
) -> Program:
  """Lowers a window in which an exchange ends, late enough in a run.

  Of the windows of a round it is the one that sends most. Where nothing travels
  beside its steps they are a program of their own, and this one is lowered.

  Args:
    config: Config of a run.
    devices: Devices to compile for; None: those of this machine.

  Raises:
    ValueError: If the run is too short to have such a window.
  """
  programs = build.programs(config, _parts(config), devices=devices)
  traffic, data = to_plan.traffic(config), config.data

  def batches(num_steps: int) -> jax.ShapeDtypeStruct:
    rows = num_steps, data.batch_size, data.sequence_length + 1
    return jax.ShapeDtypeStruct((config.mesh.num_replicas, *rows), np.int32)

  if config.sync.named.exchanged == "gradient":
    segment = to_plan.run_plan(config).segment(0)
    state, place = states.abstract(programs, segment.phase), programs.steps
    given = batches(segment.num_steps).update(
      sharding=place.replicas.batch_sharding
    )
    lowered = place.compiled.lower(state, given, programs.rounds.frozen)
    sent = traffic.segment_bytes(segment)
    return Program(segment.num_steps, sent, 0, lowered)
  step, window = _fullest_window(config)
  if programs.rounds.runtime.splits_windows:
    window = window.parts[0]  # Its steps, beside which nothing is exchanged.
  counts = config.sync.named.schedule.num_in_flight(step)
  state = states.abstract(programs, "rounds", in_flight=counts)
  assert isinstance(state, RoundState)
  steps = config.sync.named.schedule.sync_interval
  lowered = programs.rounds.lowered(state, batches(steps), window)
  applied = window.applied
  sent = traffic.exchange_bytes(applied.fragment) if applied else 0
  return Program(window.num_steps, sent, _kept_bytes(state, window), lowered)


def _parts(config: RunConfig) -> Parts:
  """Returns what is trained, if not all, beside the shapes of the rest."""
  if not config.lora.rank:
    return NO_PARTS
  base = {
    path: jax.ShapeDtypeStruct(shape, np.float32)
    for path, shape in config.model.shape.parameter_shapes.items()
  }
  return Parts(trainable=adapters.adapt(config.lora, nested(base)))


def _fullest_window(config: RunConfig) -> tuple[int, Window]:
  """Returns the window that sends most, and the schedule's step before it."""
  plan, traffic = to_plan.run_plan(config), to_plan.traffic(config)
  schedule = config.sync.named.schedule
  interval = schedule.sync_interval
  start = (schedule.depth + 1) * interval
  least = plan.local_start + start + interval
  if least > plan.total_steps:
    raise ValueError(
      f"total_steps={plan.total_steps} ends before everything that is sent in "
      f"one round arrives in another: take at least {least}"
    )
  windows = list(schedule.windows(start, start + interval))
  lengths = (window.num_steps for window in windows)
  steps = itertools.accumulate(lengths, initial=start)

  def size(each: tuple[int, Window]) -> tuple[int, bool]:
    applied = each[1].applied
    sent = traffic.exchange_bytes(applied.fragment) if applied else -1
    return sent, bool(each[1].sent)

  return max(zip(steps, windows, strict=False), key=size)


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


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of one device, for one window of a run.

  Attributes:
    name: Method and model.
    machine: The slices, e.g. "2 x v5p:4x4x8".
    memory_bytes: Memory of a device.
    num_steps: Inner steps of the window.
    state_bytes: What the program is given, and what lies beside it.
    temporaries_bytes: What it needs while it runs.
    needed_bytes: Memory that the run needs.
    sent_bytes: Bytes that go to other slices.
    planned_bytes: The same by the plan.
    transfers: Transfers between slices.
  """

  name: str
  machine: str
  memory_bytes: int
  num_steps: int
  state_bytes: int
  temporaries_bytes: int
  needed_bytes: int
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
    hidden = sum(bool(each.loops) for each in self.transfers)
    return (
      f"A window of {self.num_steps} inner steps {fit} on {self.machine}."
      f" {hidden} of {len(self.transfers)} transfers between slices start"
      " before inner steps and end after them. Nothing was run: all numbers are"
      " the compiler's."
    )


def compiled_run(config: RunConfig, topology: str, num_slices: int) -> Compiled:
  """Compiles a run for slices that need not exist, of which it uses all chips.

  Stacked replicas share one chip.

  Args:
    config: Config of the run.
    topology: Kind and size of a slice, e.g. "v5p:4x4x8".
    num_slices: Number of slices.

  Raises:
    ValueError: One line that says what is wrong, e.g. that the compiler found
      no way to fit the program into a chip.
  """
  devices = topology_devices(topology, num_slices)
  machine = f"{num_slices} x {topology}"
  if config.mesh.layout == "stacked":
    devices, machine = devices[:1], f"one chip of {topology}"
  kind = devices[0].device_kind
  require(
    config.num_devices == len(devices),
    f"the run has {config.num_devices} devices and the slices have"
    f" {len(devices)}: num_replicas x num_data_shards x num_stages must be all"
    " of them, e.g. --config.mesh.num_stages=2 --config.mesh.num_data_shards=2"
    " for v5e:2x2",
  )
  require(kind in _MEMORY_GIB, f"the memory of {kind!r} is not known here")
  program = steady_program(config, devices)
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
  memory = int(_MEMORY_GIB[kind] * 2**30)
  return analyse(config, program, compiled, machine, memory)


def analyse(
  config: RunConfig,
  program: Program,
  compiled: jax.stages.Compiled,
  machine: str,
  memory_bytes: int,
) -> Compiled:
  """Reads memory and transfers from a compiled program.

  Args:
    config: Config of the run.
    program: What was compiled.
    compiled: The result.
    machine: The slices, in words.
    memory_bytes: Memory of a device.
  """
  sizes: Any = compiled.memory_analysis()
  found = transfers(compiled.as_text() or "")
  state = sizes.argument_size_in_bytes + program.kept_bytes
  # What is given may be reused for what is returned.
  returned = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  beside = sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes
  count = config.mesh.num_replicas
  return Compiled(
    f"{config.sync.method}, {config.model.preset or 'own model'}",
    machine,
    memory_bytes,
    program.num_steps,
    state,
    sizes.temp_size_in_bytes,
    state + returned + beside,
    math.fsum(each.sent_bytes(count) for each in found),
    program.planned_bytes / config.division.num_devices,
    found,
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
  values: dict[str, Any] = dataclasses.asdict(compiled)
  write_json(workdir / "compiled.json", values | {"fits": compiled.fits})
  rows = [
    (name.removesuffix("_bytes"), human_bytes(round(size)))
    for name, size in values.items()
    if name.endswith("_bytes")
  ]
  moved = [
    (each.kind, human_bytes(each.operand_bytes), "yes" if each.loops else "no")
    for each in compiled.transfers
  ]
  lines = [
    *(compiled.finding, "", "## Memory of a device, and its bytes", ""),
    *markdown_table(("what", "size"), rows),
    *("", "## Transfers between slices", ""),
    *markdown_table(("kind", "operand", "hidden by inner steps"), moved),
  ]
  title = f"{compiled.name}, compiled for {compiled.machine}"
  return write_page(workdir, title, lines, command)
