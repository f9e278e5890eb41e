"""Measures how fast parts of the system run on this machine.

  python -m experiments.tools.bench round --workdir=runs/bench
  python -m experiments.tools.bench codecs --workdir=runs/bench --repeats=21
  python -m experiments.tools.bench inner --workdir=runs/bench --config=...

`round` and `codecs` compare pairs of programs that run in turn, and report the
median of the ratios of neighboring times. `inner` reports tokens a second,
utilization and memory of the inner steps of --config. The other benches refuse
--config. Results go to WORKDIR/bench_NAME.json and to the terminal.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from experiments.runtime import (
  command_line,
  config_flag,
  parts_flag,
  run_configs,
  workdir_flag,
)

BENCHES = ("round", "codecs", "inner")

flags.adopt_module_key_flags(config_flag)
flags.adopt_module_key_flags(workdir_flag)
_REPEATS = flags.DEFINE_integer(
  "repeats", 9, "Number of measurements of each ratio or rate.", lower_bound=3
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Runs the bench that the command line names, and writes its results."""
  bench = command_line.chosen_argument("bench", argv, BENCHES)
  if bench != "inner" and config_flag.is_given():
    raise command_line.UsageError(
      f"the bench {bench} reads no config: leave out --config"
    )
  parts_flag.register()
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "bench")
  import jax

  from dilocox_jax.metrics.lines import write_json

  record = _inner_record() if bench == "inner" else _ratios_record(bench)
  path = workdir / f"bench_{bench}.json"
  device = jax.devices()[0].device_kind
  write_json(path, {"device": device, "jax": jax.__version__, **record})
  print(f"results: {path}")


def _inner_record() -> dict[str, Any]:
  """Measures and prints the speed of the inner steps of --config.

  Returns the measured values by name, for the JSON file.
  """
  from experiments.runtime import running

  config = run_configs.run_config(config_flag.CONFIG.value)
  running.set_up_jax(config.num_devices)
  from experiments.tools import bench_inner

  with command_line.usage_errors():
    record = bench_inner.measure_steps(config, _REPEATS.value)
  _print(("measured",), {name: (value,) for name, value in record.items()})
  return record


def _ratios_record(bench: str) -> dict[str, Any]:
  """Measures and prints the ratios of times of the bench "round" or "codecs".

  Returns the results for the JSON file.
  """
  from experiments.runtime import running

  running.set_up_jax()
  from experiments.tools import bench_programs, timing

  results = {}
  with command_line.usage_errors():
    if bench == "round":
      ratios = bench_programs.round_ratios()
    else:
      ratios = bench_programs.codec_ratios()
    for ratio in ratios:
      results[ratio.name] = timing.measure_ratio(ratio, _REPEATS.value)
  columns = ("median", "min", "max", "bound")
  rows = {
    name: [result[column] for column in columns]
    for name, result in results.items()
  }
  _print(columns, rows)
  return {
    "label": "measured: medians of paired ratios in one process",
    "repeats": _REPEATS.value,
    "ratios": results,
  }


def _print(columns: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> None:
  """Prints a table: column names, and values by the name of the row."""
  from rich.console import Console

  from dilocox_jax.report.tables import terminal_table

  cells = [(name, *map(_cell, values)) for name, values in rows.items()]
  Console().print(terminal_table(("what", *columns), cells))


def _cell(value: Any) -> str:
  """Returns a value as text. A float has at most four digits."""
  return f"{value:.4g}" if isinstance(value, float) else f"{value}"


if __name__ == "__main__":
  app.run(main, flags_parser=config_flag.parse_flags)
