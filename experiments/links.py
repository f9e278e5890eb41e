"""Runs exchanges over real throttled links, beside the simulator's seconds.

  python -m experiments.links --workdir=runs/links
  python -m experiments.links --workdir=runs/links --calibrate

Every process has a network namespace of its own, and the kernel throttles its
link (`experiments.launch --link`). The page has one row a case: predicted and
measured seconds, and the bytes that the kernel counted beside the plan's.
Predictions use what --calibrate measures first: how long gloo's collectives
between two and among four processes take on this machine, at other sizes and
rates than those of the cases. With --calibrate nothing else is run.

--cases=all also trains on a link that opens and closes during one run, which
shows whether an exchange hides behind the inner steps; trains several methods
over 1 Gbit/s, 200 and 50 Mbit/s; and trains over links so slow that an
all-reduce takes 32 and 357 times as long as a step. --cases=collectives,
overlap, bandwidths or speedup do one of these alone. --cases=ranking, which all
leaves out, compares the simulator's order of eight settings with the measured
one.
"""

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from absl import flags
from rich.console import Console

from dilocox_jax.metrics.run_record import RECORD
from experiments.runtime import command_line

if TYPE_CHECKING:
  from dilocox_jax.simulate.transfer import Transport

_TRAINED = ("overlap", "bandwidths", "speedup", "ranking")


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_bool(
    "calibrate", False, "Only measure and print the transport, in a minute."
  )
  flags.DEFINE_enum(
    "cases",
    "all",
    ("all", "quick", "collectives", *_TRAINED),
    "Which cases; quick takes some seconds, all about 15 minutes.",
  )


def main(values: flags.FlagValues) -> None:
  """Measures, writes page and JSON, and prints the table."""
  # This loads JAX, which takes seconds.
  from dilocox_jax.metrics.lines import write_json
  from experiments.real_links import cases, page

  workdir = command_line.writable(values.workdir, "links")
  if not values.calibrate and values.cases in ("all", *_TRAINED):
    _check_no_runs(workdir)
  is_quick = values.cases == "quick" and not values.calibrate
  repeats = cases.REPEATS if is_quick else cases.CALIBRATION_REPEATS
  transport = cases.calibrated(workdir, repeats)
  print(f"transport: {transport}", flush=True)
  write_json(workdir / "transport.json", dataclasses.asdict(transport))
  if values.calibrate:
    return
  found = page.Found()
  for change in _parts(values.cases, transport, workdir):
    found = dataclasses.replace(found, **change())
    # The next part may fail, and takes minutes.
    lines = page.report(found, transport, workdir)
  Console().print(*lines, sep="\n")
  print(f"report: {workdir / 'report.md'}")


def _check_no_runs(workdir: pathlib.Path) -> None:
  """Raises UsageError if an earlier call has trained in the directory.

  A run that is finished is not trained again, so its old times would be read.
  """
  for record in workdir.glob(f"*/{RECORD}"):
    raise command_line.UsageError(
      f"{record.parent} holds a run of an earlier measurement: choose another"
      " --workdir"
    )


def _parts(wanted: str, transport: "Transport", workdir: pathlib.Path):
  """Returns functions that run a part each and return fields of the page."""
  from experiments.real_links import (
    bandwidths,
    cases,
    overlap,
    ranking,
    speedup,
  )

  def collectives():
    given = cases.quick_cases() if wanted == "quick" else cases.all_cases()
    return {"rows": cases.run_cases(given, transport, workdir)}

  def methods():
    over_open = cases.calibrated_open(workdir)
    rows, curves = bandwidths.run_all(transport, over_open, workdir)
    return {"bandwidths": rows, "curves": curves}

  parts = {
    "collectives": collectives,
    "overlap": lambda: {"overlaps": overlap.run_all(transport, workdir)},
    "bandwidths": methods,
    "speedup": lambda: {"speedups": speedup.run_all(transport, workdir)},
  }
  if wanted == "all":
    return list(parts.values())
  parts["quick"] = collectives
  parts["ranking"] = lambda: {"ranked": ranking.run_all(transport, workdir)}
  return [parts[wanted]]


if __name__ == "__main__":
  command_line.main(main, define_flags)
