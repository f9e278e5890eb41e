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
shows whether an exchange hides behind the inner steps, and on links so slow
that an all-reduce takes 32 and 357 times as long as a step, and it compares the
simulator's ranking of eight settings with the measured one. --cases=speedup and
--cases=ranking do one of these alone.
"""

import dataclasses

from absl import flags

from experiments.runtime import command_line


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_bool(
    "calibrate", False, "Only measure and print the transport, in a minute."
  )
  flags.DEFINE_enum(
    "cases",
    "all",
    ("all", "quick", "speedup", "ranking"),
    "Which cases; quick takes some seconds.",
  )


def main(values: flags.FlagValues) -> None:
  """Measures, writes page and JSON, and prints the table."""
  # This loads JAX, which takes seconds.
  from dilocox_jax.metrics.lines import write_json
  from experiments.real_links import (
    cases,
    overlap,
    page,
    ranking,
    speedup,
    timed_runs,
  )

  workdir = command_line.writable(values.workdir)
  transport = cases.calibrated(workdir)
  print(f"transport: {transport}", flush=True)
  write_json(workdir / "transport.json", dataclasses.asdict(transport))
  if values.calibrate:
    return
  chosen = {"quick": cases.quick_cases(), "all": cases.all_cases()}
  rows = cases.run_cases(chosen.get(values.cases, ()), transport, workdir)
  overlaps, speedups, ranked = [], [], []
  if values.cases == "all":
    overlaps = overlap.run_all(transport, workdir)
  if values.cases in ("all", "speedup", "ranking"):
    step_s = timed_runs.open_step_s(workdir)
    if values.cases != "ranking":
      speedups = speedup.run_all(step_s, transport, workdir)
    if values.cases != "speedup":
      ranked = ranking.run_all(step_s, transport, workdir)
  page.report(rows, overlaps, speedups, ranked, transport, workdir)


if __name__ == "__main__":
  command_line.main(main, define_flags)
