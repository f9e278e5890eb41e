"""Compiles a run for TPUs or GPUs that this machine need not have.

The result says how much memory a device needs, and what it sends to other
slices (groups of devices with fast links). One program of the run is compiled,
without allocating any array. It has the inner steps up to an update of a
fragment (part of the parameters), and the exchange for this update, unless
exchanges are programs of their own. For a method that averages gradients, it
has the first steps of the run.

The bytes that are sent between slices are read from the program's text. For
GPUs they are not known, because the text does not tell transfers between slices
from others.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.config.device_memory import chosen_gather
from dilocox_jax.distributed import host_memory
from dilocox_jax.metrics.lines import write_json
from dilocox_jax.models import adapters
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.report.page import write_page
from dilocox_jax.report.tables import markdown_table
from dilocox_jax.report.units import human_bytes, human_share
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training import build, states
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.trees import nested
from experiments.tools.absent_devices import absent_devices
from experiments.tools.compiled_transfers import Transfer, transfers


class Program(NamedTuple):
  """A traced program of a run: some inner steps, and what they exchange.

  Attributes:
    num_steps: Number of inner steps of the program.
    planned_bytes: Bytes that one replica should send in the program, computed
      from the config.
    idle_bytes: Bytes of the training state that a device keeps although the
      program does not read them: those of fragments (parts of the parameters)
      whose pseudo-gradients the program neither measures nor applies.
    lowered: The program, traced but not compiled yet.
  """

  num_steps: int
  planned_bytes: int
  idle_bytes: int
  lowered: jax.stages.Lowered


def steady_program(
  config: RunConfig, devices: Sequence[Any] | None = None
) -> Program:
  """Traces one program of a run as it is in the middle of the run.

  For a method with rounds, the program has some inner steps and the exchange of
  a fragment (part of the parameters) that is updated after them. Of all
  fragments, the one with the most bytes is taken. If exchanges are programs of
  their own, as on one device, only the steps are traced. For a method that
  averages gradients, it is the program of the first steps.

  Args:
    config: Config of a run.
    devices: Devices to compile for; None: the devices of this machine.

  Raises:
    ValueError: If the run is too short to have such a program.
  """
  programs = build.programs(config, _overrides(config), devices=devices)
  if config.sync.named.exchanged == "gradient":
    return _segment_of_gradients(config, programs)
  step, window = _fullest_window(config)
  if programs.rounds.runtime.splits_windows:
    window = window.parts[0]  # The steps, beside which nothing is exchanged.
  schedule = config.sync.named.schedule
  state = states.abstract(
    programs, "rounds", in_flight=schedule.num_in_flight(step)
  )
  assert isinstance(state, RoundState)
  batches = _batches(config, schedule.sync_interval)
  planned_bytes = 0
  if window.applied:
    planned_bytes = to_plan.traffic(config).exchange_bytes(
      window.applied.fragment
    )
  return Program(
    num_steps=window.num_steps,
    planned_bytes=planned_bytes,
    idle_bytes=_idle_bytes(state, window),
    lowered=programs.rounds.lowered(state, batches, window),
  )


def _segment_of_gradients(
  config: RunConfig, programs: build.Programs
) -> Program:
  """Traces the program of the first steps, whose gradients are averaged."""
  segment = to_plan.run_plan(config).segment(0)
  state = states.abstract(programs, segment.phase)
  batches = _batches(config, segment.num_steps).update(
    sharding=programs.steps.replicas.batch_sharding
  )
  return Program(
    num_steps=segment.num_steps,
    planned_bytes=to_plan.traffic(config).segment_bytes(segment),
    idle_bytes=0,
    lowered=programs.steps.compiled.lower(
      state, batches, programs.rounds.frozen
    ),
  )


def _batches(config: RunConfig, num_steps: int) -> jax.ShapeDtypeStruct:
  """Returns shape and type of the tokens of steps, [M, num_steps, B, L + 1]."""
  data = config.data
  shape = (
    config.mesh.num_replicas,
    num_steps,
    data.batch_size,
    data.sequence_length + 1,
  )
  return jax.ShapeDtypeStruct(shape, np.int32)


def _overrides(config: RunConfig) -> Overrides:
  """Returns shapes of adapters and frozen base model, if a run has adapters.

  They stand for arrays when the run is compiled.
  """
  if not config.lora.rank:
    return NO_OVERRIDES
  base = {
    path: jax.ShapeDtypeStruct(shape, np.float32)
    for path, shape in config.model.shape.parameter_shapes.items()
  }
  return Overrides(trainable=adapters.adapt(config.lora, nested(base)))


def _fullest_window(config: RunConfig) -> tuple[int, Window]:
  """Finds the window whose exchange has the most bytes, in the middle of a run.

  A *window* is the inner steps up to the update of a fragment (part of the
  parameters) or the measurement of its pseudo-gradient.

  Returns:
    The number of the schedule's inner steps before the window, and the window.

  Raises:
    ValueError: If the run is too short to have such a window.
  """
  plan = to_plan.run_plan(config)
  traffic = to_plan.traffic(config)
  schedule = config.sync.named.schedule
  interval = schedule.sync_interval
  # In this round, results of earlier rounds arrive, as in most rounds.
  start = schedule.steady_step + interval
  # The schedule begins after `local_start` data-parallel steps.
  needed_steps = plan.local_start + start + interval
  if needed_steps > plan.total_steps:
    raise ValueError(
      f"total_steps={plan.total_steps} ends before everything that is sent in "
      f"one round arrives in another: take at least {needed_steps}"
    )

  def size(window: Window) -> tuple[int, bool]:
    # A window that applies a fragment exchanges it during its inner steps. Of
    # windows with equal bytes, a window that also sends has more work.
    num_bytes = -1
    if window.applied:
      num_bytes = traffic.exchange_bytes(window.applied.fragment)
    return num_bytes, bool(window.sent)

  windows = list(schedule.windows(start, start + interval))
  fullest = max(range(len(windows)), key=lambda number: size(windows[number]))
  steps_before = sum(window.num_steps for window in windows[:fullest])
  return start + steps_before, windows[fullest]


def _idle_bytes(state: RoundState, window: Window) -> int:
  """Returns a device's bytes of the fragments that a window does not touch.

  Such a fragment (part of the parameters) is neither applied nor sent. Bytes in
  the host's memory do not count.
  """
  events = (window.applied, window.sent)
  busy = {event.fragment for event in events if event}
  idle_fragments = [
    fragment
    for number, fragment in enumerate(state.fragments)
    if number not in busy
  ]
  num_bytes = 0
  for leaf in jax.tree.leaves(idle_fragments):
    if leaf.sharding.memory_kind != host_memory.HOST:
      shape = leaf.sharding.shard_shape(leaf.shape)
      num_bytes += math.prod(shape) * leaf.dtype.itemsize
  return num_bytes


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What one device needs and sends for a program of a run.

  Attributes:
    name: Method and model.
    machine: The slices (groups of devices with fast links), or the one device,
      e.g. "2 x v5p:4x4x8".
    memory_bytes: Memory of a device (bytes).
    num_steps: Number of inner steps of the program.
    state_bytes: Memory of the program's arguments, and of the state that the
      program does not read (bytes).
    temporaries_bytes: Memory that only the running program needs (bytes).
    needed_bytes: Memory that the run needs on the device in all (bytes), as the
      compiler counts it.
    planned_bytes: Bytes that the device should send to other slices, computed
      from the config.
    sent_bytes: Bytes that the device sends to other slices, by the program's
      text; None for GPUs.
    transfers: Transfers between slices; None for GPUs.
  """

  name: str
  machine: str
  memory_bytes: int
  num_steps: int
  state_bytes: int
  temporaries_bytes: int
  needed_bytes: int
  planned_bytes: float
  sent_bytes: float | None
  transfers: list[Transfer] | None

  @property
  def fits(self) -> bool:
    """Whether the memory of a device is enough for the run."""
    return self.needed_bytes <= self.memory_bytes

  @property
  def finding(self) -> str:
    """Sentences for the report that say whether the run fits.

    For TPUs they also count the transfers between slices that inner steps hide.
    """
    spare = 1 - self.needed_bytes / self.memory_bytes
    fit = f"fits with {human_share(spare)} to spare"
    if not self.fits:
      fit = f"does NOT fit: it lacks {human_share(-spare)} of a device's memory"
    sentences = [
      f"A window of {self.num_steps} inner steps {fit} on {self.machine}."
    ]
    if self.transfers is not None:
      num_hidden = sum(bool(transfer.loops) for transfer in self.transfers)
      sentences.append(
        f"{num_hidden} of {len(self.transfers)} transfers between slices start"
        " before inner steps and end after them."
      )
    sentences.append("Nothing was run: all numbers are the compiler's.")
    return " ".join(sentences)


def compiled_run(config: RunConfig, topology: str, num_slices: int) -> Compiled:
  """Compiles a run for absent devices, and returns what one device needs.

  The run must use all devices of the slices, or one device if its replicas are
  stacked.

  Args:
    config: Config of the run.
    topology: Kind and size of a slice, e.g. "v5p:4x4x8" or "h100:8"
      (`absent_devices`).
    num_slices: Number of slices (groups of devices with fast links).

  Raises:
    ValueError: If the compiler is missing or knows no such slice, if the run
      does not use all devices or is too short, or if the program cannot be
      compiled without a GPU or does not fit into a device.
    jax.errors.JaxRuntimeError: If the compiler fails for another reason.
  """
  absent = absent_devices(topology, num_slices)
  devices = absent.devices
  machine = f"{num_slices} x {topology}"
  if config.mesh.layout == "stacked":
    devices = devices[:1]
    machine = f"one device of {topology}"
  require(
    config.num_devices == len(devices),
    f"the run has {config.num_devices} devices and the slices have"
    f" {len(devices)}: num_replicas x num_data_shards x"
    " num_tensor_shards x num_stages must be all of them, e.g."
    " --config.mesh.num_stages=2 --config.mesh.num_data_shards=2 for v5e:2x2",
  )
  # A run with pipeline stages chooses `mesh.gather` by the memory of its
  # devices. Absent devices cannot be asked for their memory, so it is chosen
  # here.
  gather = chosen_gather(config, absent.memory_bytes, absent.platform)
  if config.mesh.num_stages > 1:
    mesh = dataclasses.replace(config.mesh, gather=gather)
    config = dataclasses.replace(config, mesh=mesh)
  if absent.platform == "gpu":
    config = without_cudnn(config)
  program = steady_program(config, devices)
  try:
    compiled = program.lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    reason = str(error).strip().splitlines()[0]
    raise ValueError(
      f"the program does not fit into a device ({reason[:200]}): take more"
      " stages or data shards, a smaller batch or rank, or mesh.remat='full'"
    ) from error
  return analyze(
    config,
    program,
    compiled,
    machine=machine,
    memory_bytes=absent.memory_bytes,
    has_transfers=absent.platform == "tpu",
  )


def without_cudnn(config: RunConfig) -> RunConfig:
  """Returns a config whose attention can be compiled without a GPU.

  Attention "auto" becomes "blockwise", which needs about as much memory as
  cuDNN's attention. Other choices stay.

  Raises:
    ValueError: If the config asks for cuDNN's attention.
  """
  # cuDNN asks the GPU for its properties.
  require(
    config.model.attention != "cudnn",
    "model.attention=cudnn cannot be compiled without a GPU: take"
    " model.attention=blockwise, which needs about as much memory",
  )
  if config.model.attention != "auto":
    return config
  model = dataclasses.replace(config.model, attention="blockwise")
  return dataclasses.replace(config, model=model)


def analyze(
  config: RunConfig,
  program: Program,
  compiled: jax.stages.Compiled,
  machine: str,
  memory_bytes: int,
  has_transfers: bool = True,
) -> Compiled:
  """Reads memory and transfers from a compiled program.

  Args:
    config: Config of the run.
    program: The program that was compiled.
    compiled: The compiled program.
    machine: The slices (groups of devices with fast links) in words, e.g.
      "2 x v5p:4x4x8".
    memory_bytes: Memory of a device (bytes).
    has_transfers: Whether the program's text says which transfers go to other
      slices.
  """
  sizes: Any = compiled.memory_analysis()
  slice_transfers = None
  sent_bytes = None
  if has_transfers:
    slice_transfers = transfers(compiled.as_text() or "")
    num_replicas = config.mesh.num_replicas
    sent_bytes = math.fsum(
      transfer.sent_bytes(num_replicas) for transfer in slice_transfers
    )
  state_bytes = sizes.argument_size_in_bytes + program.idle_bytes
  # The program writes some results over its arguments.
  new_bytes = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  needed_bytes = (
    state_bytes
    + new_bytes
    + sizes.temp_size_in_bytes
    + sizes.generated_code_size_in_bytes
  )
  return Compiled(
    name=f"{config.sync.method}, {config.model.preset or 'own model'}",
    machine=machine,
    memory_bytes=memory_bytes,
    num_steps=program.num_steps,
    state_bytes=state_bytes,
    temporaries_bytes=sizes.temp_size_in_bytes,
    needed_bytes=needed_bytes,
    planned_bytes=program.planned_bytes / config.division.num_devices,
    sent_bytes=sent_bytes,
    transfers=slice_transfers,
  )


def write_compiled(
  compiled: Compiled, workdir: pathlib.Path, command: str
) -> pathlib.Path:
  """Writes the page `report.md` and the data `compiled.json` into a directory.

  The page shows `command`, the command line that made it. Returns the path of
  the page.
  """
  values: dict[str, Any] = dataclasses.asdict(compiled)
  write_json(workdir / "compiled.json", values | {"fits": compiled.fits})
  rows = [
    (name.removesuffix("_bytes"), human_bytes(round(size)))
    for name, size in values.items()
    if name.endswith("_bytes") and size is not None
  ]
  lines = [
    compiled.finding,
    "",
    "## Memory of a device, and its bytes",
    "",
    *markdown_table(("what", "size"), rows),
    "",
    "## Transfers between slices",
    "",
    *_transfer_lines(compiled.transfers),
  ]
  title = f"{compiled.name}, compiled for {compiled.machine}"
  return write_page(workdir, title, lines, command)


def _transfer_lines(slice_transfers: Sequence[Transfer] | None) -> list[str]:
  """Returns the report's lines about transfers between slices.

  Slices are groups of devices with fast links. If `slice_transfers` is None,
  the lines say that the transfers are not known.
  """
  if slice_transfers is None:
    return [
      "They are not listed: a program for GPUs does not say which of its"
      " transfers leave a slice."
    ]
  rows = [
    (
      transfer.kind,
      human_bytes(transfer.operand_bytes),
      "yes" if transfer.loops else "no",
    )
    for transfer in slice_transfers
  ]
  return markdown_table(("kind", "operand", "hidden by inner steps"), rows)
