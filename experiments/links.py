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

from absl import flags

from experiments.runtime import command_line

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
    "Which cases; quick takes some seconds, all about 20 minutes.",
  )


def main(values: flags.FlagValues) -> None:
  """Measures, writes page and JSON, and prints the table."""
  # This loads JAX, which takes seconds.
  from dilocox_jax.metrics.lines import write_json
  from experiments.real_links import (
    bandwidths,
    cases,
    overlap,
    page,
    ranking,
    speedup,
  )

  workdir = command_line.writable(values.workdir)
  transport = cases.calibrated(workdir)
  print(f"transport: {transport}", flush=True)
  write_json(workdir / "transport.json", dataclasses.asdict(transport))
  if values.calibrate:
    return
  wanted = values.cases
  chosen = {"quick": cases.quick_cases()}
  chosen |= dict.fromkeys(("all", "collectives"), cases.all_cases())
  rows = cases.run_cases(chosen.get(wanted, ()), transport, workdir)
  found = page.Found(rows)
  if wanted in ("all", "overlap"):
    overlaps = overlap.run_all(transport, workdir)
    found = dataclasses.replace(found, overlaps=overlaps)
  if wanted in ("all", "bandwidths"):
    measured, curves = bandwidths.run_all(transport, workdir)
    found = dataclasses.replace(found, bandwidths=measured, curves=curves)
  if wanted in ("all", "speedup"):
    speedups = speedup.run_all(transport, workdir)
    found = dataclasses.replace(found, speedups=speedups)
  if wanted == "ranking":
    found = page.Found(ranked=ranking.run_all(transport, workdir))
  page.report(found, transport, workdir)


if __name__ == "__main__":
  command_line.main(main, define_flags)
