"""Times exchanges over real throttled links, beside the simulator's times.

  python -m experiments.tools.links --workdir=runs/links
  python -m experiments.tools.links --workdir=runs/links --cases=calibrate
  python -m experiments.tools.links --workdir=runs/links --cases=processes

Every process has a network namespace of its own, and the kernel throttles its
link (`experiments.launch --link`). The page has a row for each collective or
method: the predicted and the measured seconds, and the bytes that the kernel
counted divided by the predicted bytes.

The first command times collectives, and trains several methods over 200 and 50
Mbit/s. Its predictions use a calibration, which runs first. It measures how
long gloo's collectives between two and among four processes take on this
machine, at other sizes and rates. With --cases=calibrate only the calibration
is run.

--cases=processes times collectives over 20 to 200 Mbit/s, among two, four and
eight processes (or other numbers, --processes), without a calibration. The page
says whether the links or the cores limit a collective. It names the cores if
the collective takes more than a fifth of its time even over links that are not
throttled.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence

from absl import app, flags

from experiments.runtime import command_line, workdir_flag

flags.adopt_module_key_flags(workdir_flag)
_CASES = flags.DEFINE_enum(
  "cases",
  "all",
  ("all", "calibrate", "quick", "collectives", "methods", "processes"),
  "Which cases; quick takes some seconds, all about ten minutes, calibrate a "
  "minute, for the transport alone, and processes a quarter of an hour.",
)
_PROCESSES = flags.DEFINE_multi_integer(
  "processes",
  [2, 4, 8],
  "Numbers of processes of --cases=processes.",
  lower_bound=2,
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Times the cases of --cases, writes page and JSON, and prints the page.

  With --cases=calibrate there is no page: only the calibration of gloo is
  printed, and written to transport.json.
  """
  command_line.refuse_arguments(argv)
  cases = _CASES.value
  command_line.refuse_unused(
    _PROCESSES, is_used=cases == "processes", needs="--cases=processes"
  )
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "links")
  if cases == "processes":
    _report_processes(_PROCESSES.value, workdir)
  else:
    _report_cases(cases, workdir)


def _report_cases(cases: str, workdir: pathlib.Path) -> None:
  """Calibrates the transport, and then times the cases of --cases.

  `cases` is the value of --cases, any but "processes".
  """
  # This loads JAX, which takes seconds.
  from dilocox_jax.metrics.lines import write_json
  from experiments.tools import link_runs, links_page

  repeats = link_runs.CALIBRATION_REPEATS
  if cases == "quick":
    repeats = link_runs.REPEATS
  transport = link_runs.calibrated(workdir, repeats)
  print(f"transport: {transport}", flush=True)
  write_json(workdir / "transport.json", dataclasses.asdict(transport))
  if cases == "calibrate":
    return
  rows = []
  lines = []
  if cases != "methods":
    collectives = link_runs.CASES
    if cases == "quick":
      collectives = link_runs.QUICK_CASES
    rows += link_runs.run_cases(collectives, transport, workdir)
    # Training may fail, and takes minutes. So these rows are written before.
    lines = links_page.report(rows, workdir)
  if cases in ("all", "methods"):
    # A new folder, because runs that were finished in an old one would not be
    # trained again.
    runs_folder = tempfile.mkdtemp(prefix="runs_", dir=workdir)
    rows += link_runs.run_methods(transport, pathlib.Path(runs_folder))
    lines = links_page.report(rows, workdir)
  links_page.print_report(lines, workdir)


def _report_processes(counts: list[int], workdir: pathlib.Path) -> None:
  """Times collectives among several numbers of processes; writes the page."""
  # This loads JAX, which takes seconds.
  from experiments.tools import link_runs, links_page

  rows = []
  lines = []
  for row in link_runs.run_processes(counts, workdir):
    rows.append(row)
    # All rows take a quarter of an hour, so each is written at once.
    lines = links_page.report(rows, workdir, links_page.PROCESSES_INTRO)
  links_page.print_report(lines, workdir)


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
