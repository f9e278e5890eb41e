r"""Converts the CSV files of earlier versions to runs.csv and evaluations.csv.

  git archive f78da982 docs/results | tar -x -C runs/old
  python -m experiments.sweeps.convert --runs=runs/new/runs.csv \
    runs/old/docs/results/{ablate,convergence,replicas}_*.csv

The first command takes the old files from the history of the repository. The
sweeps in the old files replace sweeps of the same names in runs.csv. Other
sweeps stay, so the command may be repeated.

Three kinds of files are read: files of sweeps, the files ablate_*.csv, and
replicas_gpu.csv.
"""

import csv
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags

from dilocox_jax.plan.model.shapes import parameter_count
from experiments.configs import convergence, replicas
from experiments.runtime import command_line
from experiments.sweeps import columns, tables
from experiments.sweeps.rows import run_id
from experiments.sweeps.runs import baseline_of, runs_of

_RUNS = flags.DEFINE_string(
  "runs", str(tables.COMMITTED), "Path of runs.csv, which is made if missing."
)
# Configs of the sweeps, which name the baselines, by name of the study.
_SWEEPS = {
  **{f"convergence_{name}": each for name, each in convergence.SWEEPS.items()},
  **{f"replicas_{name}": each for name, each in replicas.SWEEPS.items()},
}
# Columns that have another name now, by file.
_RENAMED_IN_SWEEPS = {
  "name": "setting",
  "mean_loss": "replica_mean_loss",
  "wall_s": "seconds",
}
_RENAMED_IN_ABLATIONS = {
  "run": "setting",
  "step": "steps",
  "outer_loss": "loss",
  "source_revision": "revision",
}
_RENAMED_IN_GPU = {
  "task": "setting",
  "loss_choose": "loss",
  "loss_judge": "judge_loss",
  "newest_loss_choose": "loss_newest",
  "newest_loss_judge": "judge_loss_newest",
  "collective": "exchange.collective",
  "device": "platform",
}

Cells = dict[str, Any]  # Cells of a line, by column.


def _old_lines(path: pathlib.Path) -> list[dict[str, str]]:
  """Reads the lines of a CSV file, whose cells stay texts."""
  with path.open(newline="") as file:
    return list(csv.DictReader(file))


def _renamed(line: Mapping[str, str], names: Mapping[str, str]) -> Cells:
  """Returns the cells of an old line by the names of the new columns.

  A column that is not in `names` keeps its name. NaN becomes an empty cell.
  """
  return {
    names.get(name, name): "" if text == "nan" else text
    for name, text in line.items()
  }


def of_sweep(path: pathlib.Path) -> tuple[list[Cells], list[Cells]]:
  """Converts the old file NAME.csv of a sweep, and its evaluations.

  The evaluations are read from NAME_curves.csv beside it, if this file exists.
  It also has the evaluations of NAME_others.csv, the runs that chose settings.

  Returns:
    Lines of runs.csv, and lines of evaluations.csv.
  """
  study = path.stem
  sweep = _SWEEPS.get(study, {})
  new_lines = []
  # New names of the runs. The file of curves names a run by the old digest of
  # its config and by its text.
  run_by_key = {}
  for line in _old_lines(path):
    (run,) = runs_of({}, [(line["name"], json.loads(line["overrides"]))])
    name = run_id(study, run.digest, line["corpus"])
    run_by_key[line["digest"], line["corpus"]] = name
    baseline = baseline_of(sweep, line["name"])
    cells = _renamed(line, _RENAMED_IN_SWEEPS) | columns.cells_of(run)
    for old_name in ("digest", "overrides", "total_steps"):
      del cells[old_name]
    cells |= {
      "study": study,
      "run": name,
      "parameters": parameter_count(run.config.model.shape),
      "baseline": "" if baseline == line["name"] else baseline,
    }
    new_lines.append(cells)
  points_by_run: dict[str, list[Cells]] = {}
  # NAME_others.csv has the runs by which settings were chosen. Their curves are
  # in one file with the curves of the chosen settings.
  curves = path.with_name(f"{study.removesuffix('_others')}_curves.csv")
  for point in _old_lines(curves) if curves.exists() else ():
    name = run_by_key.get((point.pop("digest"), point.pop("corpus")))
    if name:
      points_by_run.setdefault(name, []).append(point | {"run": name})
  # The evaluations get the order of the runs.
  points = [
    point
    for cells in new_lines
    for point in points_by_run.get(cells["run"], ())
  ]
  return new_lines, points


def of_ablation(path: pathlib.Path) -> tuple[list[Cells], list[Cells]]:
  """Converts one of the files ablate_*.csv.

  A file has a line for each run, or for each evaluation. In the second case the
  last evaluation of a run is its result. Returns lines of runs.csv and of
  evaluations.csv.
  """
  study = path.stem.removesuffix("_curves")
  lines_by_run: dict[str, list[Cells]] = {}
  for line in _old_lines(path):
    name = f"{study}/{line['run']}, seed {line['seed']}"
    cells = _renamed(line, _RENAMED_IN_ABLATIONS)
    cells |= {"study": study, "run": name}
    # Of the methods only the baseline is named.
    if cells["setting"].startswith("allreduce"):
      cells["method"] = "allreduce"
    lines_by_run.setdefault(name, []).append(cells)
  points = []
  for lines in lines_by_run.values():
    if len(lines) > 1:
      points += [_point(cells) for cells in lines]
  return [lines[-1] for lines in lines_by_run.values()], points


def _point(cells: Cells) -> Cells:
  """Returns an evaluation of an ablation as cells of evaluations.csv."""
  point = {name: cells[name] for name in ("run", "tokens", "sent_bytes")}
  return point | {"step": cells["steps"], "loss": cells["loss"]}


def of_gpu(path: pathlib.Path) -> tuple[list[Cells], list[Cells]]:
  """Converts replicas_gpu.csv, whose two stages become two sweeps (studies).

  Returns lines of runs.csv, and no evaluations.
  """
  new_lines = []
  for line in _old_lines(path):
    stage = line.pop("stage").replace(" ", "_")
    study = f"{path.stem}_{stage}"
    rates = [line[name] for name in ("inner_rate", "outer_rate") if line[name]]
    name = f"{line['task']}, {', '.join(rates)}, seed {line['seed']}"
    cells = _renamed(line, _RENAMED_IN_GPU)
    new_lines.append(cells | {"study": study, "run": f"{study}/{name}"})
  return new_lines, []


def convert(
  paths: Sequence[pathlib.Path],
) -> Iterator[tuple[list[Cells], list[Cells]]]:
  """Yields the lines of runs.csv and of evaluations.csv for each old file.

  A sweep's file of curves (evaluations) is skipped: it is read with the file of
  the sweep.

  Raises:
    ValueError: If a file has none of the columns by which its kind is known.
    OSError: If a file cannot be read.
  """
  for path in paths:
    with path.open(newline="") as file:
      header = next(csv.reader(file), [])
    if "overrides" in header:
      yield of_sweep(path)
    elif "source_revision" in header:
      yield of_ablation(path)
    elif "newest_loss_judge" in header:
      yield of_gpu(path)
    # Only files of curves, which `of_sweep` reads, have this column.
    elif "flushed" not in header:
      raise ValueError(f"{path} is no file of finished runs: leave it out")


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Converts the files that the command line names, and writes --runs.

  evaluations.csv is written beside --runs. Sweeps that the old files do not
  have are kept.
  """
  path = pathlib.Path(_RUNS.value)
  with command_line.usage_errors(kinds=(ValueError, OSError)):
    converted = list(convert([pathlib.Path(name) for name in argv[1:]]))
  new_runs = tables.runs_table(
    [line for lines, _ in converted for line in lines]
  )
  new_evaluations = tables.evaluations_table(
    [point for _, points in converted for point in points]
  )
  tables.replace_studies(path, new_runs, new_evaluations)
  print(f"{len(new_runs)} runs, {len(new_evaluations)} evaluations: {path}")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
