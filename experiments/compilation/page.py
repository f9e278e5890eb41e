"""The page, the figure and the numbers of a compiled program."""

import dataclasses
import pathlib
from typing import Any

from matplotlib.figure import Figure

from dilocox_jax.metrics import write_json
from dilocox_jax.report import style
from dilocox_jax.report.page import picture, write_page
from dilocox_jax.report.text_tables import markdown_table
from dilocox_jax.report.units import human_bytes, human_share
from experiments.compilation.analysis import Analysis
from experiments.compilation.transfers import Transfer

_CAPTION = (
  "Where transfers between slices start and end in the compiled program, and"
  " the loops over inner steps (read from the compiled program)."
)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the page shows.

  Attributes:
    name: Method and model.
    machine: The slices, e.g. "2 x v5p:4x4x8".
    chip: Kind of their devices.
    memory_bytes: Memory of a device.
    compile_s: Seconds that the compiler took.
    analysis: Numbers of the program.
  """

  name: str
  machine: str
  chip: str
  memory_bytes: int
  compile_s: float
  analysis: Analysis

  @property
  def fits(self) -> bool:
    """Whether the program fits into a device."""
    return self.analysis.needed_bytes <= self.memory_bytes


def write_compiled(
  compiled: Compiled, workdir: pathlib.Path, command: str
) -> pathlib.Path:
  """Writes `report.md`, `compiled.json` and the figure.

  Args:
    compiled: What was compiled.
    workdir: Directory to write into.
    command: Command line that made it.

  Returns:
    Path of the page.
  """
  values: dict[str, Any] = vars(compiled) | {"fits": compiled.fits}
  values["analysis"] = compiled.analysis.to_json()
  write_json(workdir / "compiled.json", values)
  lines = [finding(compiled), ""]
  sections = {
    "Memory of a device": _memory(compiled),
    "Products of a device": _products(compiled.analysis),
    "Collectives": _collectives(compiled.analysis),
    "Transfers between slices": _transfers(compiled.analysis),
  }
  for title, body in sections.items():
    lines += [f"## {title}", "", *body, ""]
  if compiled.analysis.transfers:
    figure = timeline_figure(compiled.analysis)
    lines += [*picture(figure, workdir, "timeline", _CAPTION), f"*{_CAPTION}*"]
  title = f"{compiled.name}, compiled for {compiled.machine}"
  return write_page(workdir, title, lines, command)


def finding(compiled: Compiled) -> str:
  """Returns what a page says first: whether the run fits, what is hidden."""
  found = compiled.analysis
  spare = 1 - found.needed_bytes / compiled.memory_bytes
  fit = f"fits with {human_share(spare)} to spare"
  if not compiled.fits:
    fit = f"does NOT fit: it lacks {human_share(-spare)} of a device's memory"
  return (
    f"A window of {found.num_steps} inner steps {fit} on {compiled.chip}."
    f" {found.num_hidden} of {len(found.transfers)} transfers between slices"
    " start before inner steps and end after them. Nothing was run: all"
    f" numbers are the compiler's, which took {compiled.compile_s:.0f} s."
  )


def _memory(compiled: Compiled) -> list[str]:
  found = compiled.analysis
  rows = [(name, human_bytes(size)) for name, size in found.memory.items()]
  rows += [
    ("needed (aliased memory counted once)", human_bytes(found.needed_bytes)),
    ("most in use at one time", human_bytes(found.peak_bytes)),
    ("there is", human_bytes(compiled.memory_bytes)),
  ]
  return markdown_table(("what", "size"), rows)


def _products(found: Analysis) -> list[str]:
  model = found.model_flops
  rows = [
    ("the model's, by its formula", f"{model:.4g}", "1"),
    ("all", f"{found.product_flops:.4g}", _ratio(found.product_flops, model)),
    (
      "of these outside the inner steps",
      f"{found.exchange_flops:.4g}",
      _ratio(found.exchange_flops, model),
    ),
  ]
  return markdown_table(("products", "FLOP", "over the model's"), rows)


def _collectives(found: Analysis) -> list[str]:
  rows = [
    (f"inside a slice, {kind}", human_bytes(size), "")
    for kind, size in found.inside_bytes.items()
    if size
  ]
  ratio = _ratio(found.sent_bytes, found.planned_bytes)
  rows.append(("between slices, sent", human_bytes(found.sent_bytes), ratio))
  rows.append(("between slices, plan", human_bytes(found.planned_bytes), "1"))
  return markdown_table(("operand of one device", "size", "over plan"), rows)


def _transfers(found: Analysis) -> list[str]:
  rows = [
    (
      each.kind,
      human_bytes(each.operand_bytes),
      each.start,
      each.end,
      " ".join(map(str, each.hidden_by)) or "none",
    )
    for each in found.transfers
  ]
  header = ("kind", "operand", "starts at", "ends at", "inner steps between at")
  return markdown_table(header, rows)


def _ratio(value: float, base: float) -> str:
  return f"{value / base:.4g}" if base else "-"


def timeline_figure(found: Analysis) -> Figure:
  """Draws transfers and loops over the instructions of the program."""
  names = list(found.timeline)
  title = (
    f"{found.num_hidden} of {len(found.transfers)} transfers run behind inner"
    " steps"
  )
  height = 1.6 + 0.22 * len(found.transfers) + 0.5 * len(names)
  figure, axes = style.frame(len(names), title, (9.6, height))
  for ax, name in zip(axes, names, strict=True):
    length, loops = found.timeline[name]
    own = [each for each in found.transfers if each.computation == name]
    for row, each in enumerate(own):
      _draw(ax, row, each)
    for number, loop in enumerate(loops):
      ax.axvline(
        loop,
        color=style.COLOURS[2],
        linewidth=4,
        label=None if number else "inner steps",
      )
    ax.set_xlim(0, length)
    ax.set_ylim(len(own) - 0.5, -0.5)
    ax.set_yticks(range(len(own)), [each.kind for each in own])
    style.label(ax, "compiled program", "number of the instruction")
  style.legend(figure, axes[0], 3)
  return figure


def _draw(ax: Any, row: int, each: Transfer) -> None:
  colour = style.COLOURS[0 if each.hidden_by else 1]
  ax.barh(row, each.end - each.start, 0.6, each.start, color=colour)
