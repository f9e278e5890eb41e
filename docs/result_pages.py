"""Writes the pages of the committed sweeps into the documentation.

  python -m docs.result_pages

The build of the documentation calls this script. For each sweep it runs
`experiments.sweep --report_only`, which trains nothing, and copies the report
with its figures to `docs/results/pages`. That takes some minutes. A page that
is newer than its rows is kept.
"""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ROOT / "docs/results/pages"
# Config of each sweep, by the name of its page.
SWEEPS = {
  "replicas_main": "replicas.py:main",
  "replicas_one": "replicas.py:one",
  "replicas_long": "replicas.py:long",
  "replicas_sizes": "replicas.py:sizes",
  "convergence_small": "convergence.py:small",
  "convergence_muon": "convergence.py:muon",
  "convergence_long": "convergence.py:long",
}


def write_page(name: str) -> pathlib.Path:
  """Writes the page of a sweep.

  Args:
    name: One of `SWEEPS`.

  Returns:
    Path of the page.

  Raises:
    subprocess.CalledProcessError: If the sweep ends with an error.
  """
  workdir = f"runs/reproduced/{name}"
  command = [
    sys.executable,
    "-m",
    "experiments.sweep",
    "--report_only",
    f"--config=experiments/configs/{SWEEPS[name]}",
    f"--workdir={workdir}",
  ]
  subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
  folder = PAGES / name
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  report = ROOT / workdir
  shutil.copy(report / "report.md", folder / "index.md")
  shutil.copytree(report / "figures", folder / "figures")
  return folder / "index.md"


def is_current(name: str) -> bool:
  """Returns whether a page exists and is newer than its rows and config."""
  page = PAGES / name / "index.md"
  if not page.exists():
    return False
  config_file, _, _ = SWEEPS[name].partition(":")
  sources = [
    ROOT / "docs/results/runs.csv",
    ROOT / "docs/results/evaluations.csv",
    ROOT / "experiments/configs" / config_file,
  ]
  newest = max(source.stat().st_mtime for source in sources)
  return page.stat().st_mtime > newest


def write_pages() -> None:
  """Writes the pages of all sweeps that are missing or out of date."""
  for name in SWEEPS:
    if not is_current(name):
      write_page(name)


if __name__ == "__main__":
  write_pages()
