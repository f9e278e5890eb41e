"""Measures how fast parts of the system run on this machine.

  python -m experiments.tools.bench round --workdir=runs/bench
  python -m experiments.tools.bench codecs --workdir=runs/bench --repeats=21
  python -m experiments.tools.bench inner --workdir=runs/bench --config=...

`round` and `codecs` compare the times of programs. The speed of a
machine changes over time, so two programs run in turn many times, and the
median of the ratios of neighbouring times is reported. `inner` reports tokens a
second, utilisation and memory of inner steps of the config --config; no other
bench reads the config. Results go to WORKDIR/bench_NAME.json and to the
terminal.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import flags
from rich.progress import track

from experiments.runtime import command_line

BENCHES = ("round", "codecs", "inner")
TimedProgram = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Ratio:
  """One comparison: how many times slower `measured` is than `baseline`.

  Attributes:
    name: What is compared.
    measured: Runs a program once and waits until it has ended.
    baseline: Does so with the other program.
    bound: What the ratio must not exceed, set beforehand.
    scale: Number by which the ratio is divided.
  """

  name: str
  measured: TimedProgram
  baseline: TimedProgram
  bound: float
  scale: float = 1.0


def seconds(program: TimedProgram) -> float:
  """Returns how long a program runs."""
  started = time.perf_counter()
  program()
  return time.perf_counter() - started


def measure_ratio(ratio: Ratio, repeats: int) -> dict[str, float | bool]:
  """Runs both programs in turn and takes medians.

  Args:
    ratio: What is compared.
    repeats: Paired measurements.
  """
  ratio.measured()  # Compiles.
  ratio.baseline()
  pairs = []
  for number in track(range(repeats), description=ratio.name):
    # A machine that gets slower while a pair runs would favour the first, so
    # every other pair begins with the baseline.
    if number % 2:
      baseline_s = seconds(ratio.baseline)
      pairs.append((seconds(ratio.measured), baseline_s))
    else:
      pairs.append((seconds(ratio.measured), seconds(ratio.baseline)))
  values = [a / b / ratio.scale for a, b in pairs]
  median = statistics.median(values)
  return {
    "median": median,
    "min": min(values),
    "max": max(values),
    "bound": ratio.bound,
    "is_within_bound": median <= ratio.bound,
    "measured_s": statistics.median(a for a, _ in pairs),
    "baseline_s": statistics.median(b for _, b in pairs),
  }


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  command_line.define_workdir()
  flags.DEFINE_enum("bench", "round", BENCHES, "Bench to run.")
  flags.DEFINE_integer(
    "repeats", 9, "Number of measurements of each ratio or rate.", lower_bound=3
  )


def main(values: flags.FlagValues) -> None:
  """Runs the bench that the flag --bench names."""
  name, repeats = values.bench, values.repeats
  if command_line.is_config_given() and name != "inner":
    raise command_line.UsageError(
      f"the bench {name} reads no config: leave out --config"
    )
  workdir = command_line.writable(values.workdir, "bench")
  import jax

  from dilocox_jax.metrics.lines import write_json
  from experiments.runtime import running

  if name == "inner":
    config = command_line.run_config(values.config)
    running.set_up_jax(config.num_devices)
    from experiments.tools import bench_inner

    with command_line.usage_errors():
      record = bench_inner.measure_steps(config, repeats)
    _print({key: (value,) for key, value in record.items()}, ("measured",))
  else:
    running.set_up_jax()
    from experiments.tools import bench_programs as programs

    ratios = {"round": programs.round_ratios, "codecs": programs.codec_ratios}
    with command_line.usage_errors():
      found = {
        each.name: measure_ratio(each, repeats) for each in ratios[name]()
      }
    columns = ("median", "min", "max", "bound")
    _print({k: [v[c] for c in columns] for k, v in found.items()}, columns)
    label = "measured: medians of paired ratios in one process"
    record = {"label": label, "repeats": repeats, "ratios": found}
  path = workdir / f"bench_{name}.json"
  device = jax.devices()[0].device_kind
  write_json(path, {"device": device, "jax": jax.__version__, **record})
  print(f"results: {path}")


def _print(rows: dict[str, Any], columns: tuple[str, ...]) -> None:
  from rich.console import Console

  from dilocox_jax.report.tables import terminal_table

  cells = [
    (name, *(f"{v:.4g}" if isinstance(v, float) else f"{v}" for v in values))
    for name, values in rows.items()
  ]
  Console().print(terminal_table(("what", *columns), cells))


if __name__ == "__main__":
  # `bench round` is turned into `bench --bench=round`. The flag refuses unknown
  # names.
  if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
    sys.argv[1] = f"--bench={sys.argv[1]}"
  command_line.main(main, define_flags)
