"""Compiles a run for TPU slices and says what the program needs and hides."""

import csv
import dataclasses
import io
import json
import pathlib
import time
from typing import Any

import jax

from dilocox_jax.config import RunConfig
from dilocox_jax.metrics.lines import write_atomically, write_json
from dilocox_jax.report.page import write_page
from dilocox_jax.report.text_tables import markdown_table
from dilocox_jax.report.units import human_bytes, human_share
from experiments.compilation import hlo
from experiments.compilation.program import Program, steady_program
from experiments.compilation.topology import (
  check_mesh,
  memory_bytes,
  topology_devices,
)
from experiments.compilation.transfers import Transfer, sent_bytes, transfers

# Columns of docs/results/compiled_memory.csv, to which a test holds the
# estimate.
COLUMNS = (
  *("run", "machine", "state_bytes", "temporaries_bytes", "needed_bytes"),
  *("peak_bytes", "memory_bytes"),
)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of one device, for one window of a run.

  Attributes:
    name: Method and model.
    machine: The slices, e.g. "2 x v5p:4x4x8".
    memory_bytes: Memory of a device.
    compile_s: Seconds that the compiler took.
    num_steps: Inner steps of the window.
    memory: Bytes of "arguments", "outputs", "aliased", "temporaries" and
      "program", and "kept": of the training state, what lies beside it.
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
  memory: dict[str, int]
  peak_bytes: int
  sent_bytes: float
  planned_bytes: float
  transfers: list[Transfer]

  @property
  def needed_bytes(self) -> int:
    """Memory of one device that the run needs (bytes)."""
    return sum(self.memory.values()) - 2 * self.memory["aliased"]

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


def compiled_report(
  config: RunConfig, topology: str, num_slices: int
) -> Compiled:
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
  check_mesh(config.mesh.num_replicas * config.division.num_devices, devices)
  program = steady_program(config, devices)
  start = time.perf_counter()
  compiled = _compiled(program)
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
  module = hlo.parse(compiled.as_text() or "")
  memory = {
    "arguments": sizes.argument_size_in_bytes,
    "outputs": sizes.output_size_in_bytes,
    "aliased": sizes.alias_size_in_bytes,
    "temporaries": sizes.temp_size_in_bytes,
    "program": sizes.generated_code_size_in_bytes,
    "kept": program.kept_bytes,
  }
  return Compiled(
    f"{config.sync.method}, {config.model.preset or 'own model'}",
    machine,
    device_bytes,
    compile_s,
    program.num_steps,
    memory,
    sizes.peak_memory_in_bytes,
    sent_bytes(module, config.mesh.num_replicas),
    program.planned_bytes / config.division.num_devices,
    transfers(module),
  )


def _compiled(program: Program) -> jax.stages.Compiled:
  try:
    return program.lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    reason = str(error).strip().splitlines()[0]
    raise ValueError(
      f"the program does not fit into a chip ({reason[:200]}): take more stages"
      " or data shards, a smaller batch or rank, or mesh.remat='full'"
    ) from error


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
  values |= {"fits": compiled.fits, "needed_bytes": compiled.needed_bytes}
  write_json(workdir / "compiled.json", values)
  sizes = compiled.memory | {
    "needed (aliased memory counted once)": compiled.needed_bytes,
    "most in use at one time": compiled.peak_bytes,
    "there is": compiled.memory_bytes,
    "sent to other slices": round(compiled.sent_bytes),
    "the same by the plan": round(compiled.planned_bytes),
  }
  rows = [(name, human_bytes(size)) for name, size in sizes.items()]
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
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  writer.writerow(COLUMNS)
  for report in sorted(reports.glob("*/compiled.json")):
    values = json.loads(report.read_text())
    memory = values["memory"]
    writer.writerow(
      (
        *(report.parent.name, values["machine"]),
        *(memory["arguments"] + memory["kept"], memory["temporaries"]),
        *(values[key] for key in COLUMNS[4:]),
      )
    )
  write_atomically(table, text.getvalue())
