"""What the README and the pages say is what the repository holds."""

import csv
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.schedule.methods import METHODS, diloco
from dilocox_jax.report.frame import standard_error
from docs.figures import loss_by_time

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
  path
  for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
  if "results" not in path.relative_to(ROOT).parts
]
# The two sweeps behind the tables of the results page: their tables, and the
# losses of each setting by seed.
TABLES: list[dict[str, str]] = []
SWEEPS: list[dict[str, list[float]]] = []
for _name in ("convergence_small", "convergence_muon"):
  with (ROOT / f"docs/results/{_name}_table.csv").open(newline="") as _file:
    TABLES += csv.DictReader(_file)
  SWEEPS.append({})
  with (ROOT / f"docs/results/{_name}.csv").open(newline="") as _file:
    for _row in csv.DictReader(_file):
      SWEEPS[-1].setdefault(_row["name"], []).append(float(_row["loss"]))
# Runs with two, four and eight replicas, by what was compared.
REPLICAS: dict[str, list[dict[str, str]]] = {}
with (ROOT / "docs/results/replicas_gpu.csv").open(newline="") as _file:
  for _row in csv.DictReader(_file):
    REPLICAS.setdefault(_row["task"], []).append(_row)


def test_the_readme_lists_every_method():
  missing = [name for name in METHODS if f"| `{name}` |" not in README]
  assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_into_the_repository_leads_somewhere(page):
  links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
  links += re.findall(r"\{doc\}`([^`<]+)`", page.read_text())
  lost = [
    link
    for link in links
    if not any((page.parent / (link + end)).exists() for end in ("", ".md"))
  ]
  assert not lost


@pytest.mark.parametrize(
  "example",
  [
    ROOT / "docs/extending.md",
    ROOT / "docs/guides/first_codec.md",
    *(
      ROOT / f"tests/extensions/{name}.py"
      for name in "ternary growing gossip parts".split()
    ),
  ],
  ids=lambda example: example.stem,
)
def test_parts_of_ones_own_need_the_package_alone(example):
  imports = re.findall(
    r"^(?:>>> )?(?:from|import) (.*)", example.read_text(), re.MULTILINE
  )
  assert "dilocox_jax as dx" in imports
  assert not [name for name in imports if name.startswith("dilocox_jax.")]


@pytest.mark.slow
def test_the_headline_is_computed_from_rows_that_were_given_the_same():
  entries = loss_by_time.read()
  for name, other in loss_by_time.PAIRS.items():
    assert entries[name].baseline == other
  early, late = (
    loss_by_time.seconds(entries[name], loss_by_time.SHOWN)[0]
    for name in ("overlap_loco", loss_by_time.PAIRS["overlap_loco"])
  )
  assert f"**{late / early:.1f} times sooner**" in README
  assert f"{early:.1f} s instead of {late:.1f} s" in README
  page = (ROOT / "docs/results.md").read_text()
  for trip in loss_by_time.ROUND_TRIPS:
    (ratio,) = loss_by_time.ratios(entries, "overlap_loco", trip)
    muloco = loss_by_time.ratios(entries, "muloco", trip)
    several = loss_by_time.ratio_text(muloco).partition(" (")[0]
    assert f"{ratio:.1f}" in README
    (row,) = re.findall(rf"^\| {trip} ms \|.*$", page, re.MULTILINE)
    assert f"| {ratio:.1f} (" in row and several in row


def test_gaps_in_the_readme_are_those_of_the_committed_runs():
  kept = {
    _gap(float(each["gap"]), float(each["gap_standard_error"]))
    for each in TABLES
  }
  # The one of `overlap_loco` to an AllReduce without an average.
  own, base = (SWEEPS[0][name] for name in ("overlap_loco", "allreduce_muon"))
  by_seed = [a / b - 1 for a, b in zip(own, base, strict=True)]
  one_sided = _gap(sum(own) / sum(base) - 1, standard_error(by_seed))
  shown = re.findall(r"\+\d\.\d\d ± \d\.\d\d %", README)
  assert len(shown) > 5
  more = {_replicas_gap(task) for task in REPLICAS if _judged(task)}
  assert set(shown) <= {*kept, *more, one_sided}


def _gap(gap: float, error: float) -> str:
  return f"{100 * gap:+.2f} ± {100 * error:.2f} %"


def test_losses_at_equal_tokens_are_those_of_the_committed_runs():
  text = _between("## Loss at equal tokens", "## Loss at equal time")
  shown = re.findall(rf"^\| [^|]+ {LOSS}", text, re.MULTILINE)
  kept = [_loss_and_seeds(each) for sweep in SWEEPS for each in sweep.values()]
  assert len(shown) > 20
  assert set(shown) <= set(kept)


@pytest.mark.parametrize(
  ("clock", "columns_before"), [("1gbit", 0), ("107b", 3)]
)
def test_losses_at_equal_time_are_those_of_the_committed_runs(
  clock, columns_before
):
  text = _between("## Loss at equal time", "## Longer runs")
  skipped = rf"(?:\| [^|]+ ){{{1 + columns_before}}}"
  shown = re.findall(rf"^{skipped}\| ([\d,]+) {LOSS}", text, re.MULTILINE)
  kept = [
    (
      name.partition(", ")[2].removesuffix(" steps") or "2,000",
      *_loss_and_seeds(x),
    )
    for sweep in SWEEPS
    for name, x in sweep.items()
  ]
  assert len(shown) > 15
  assert set(shown) <= set(kept)


# A loss with its standard error, and the lowest and the highest seed, as two
# cells of a table.
LOSS = r"\| (\d\.\d{4} ± \d\.\d{4}) \| (\d\.\d{4} to \d\.\d{4}) \|"


def _between(start: str, end: str) -> str:
  page = (ROOT / "docs/results.md").read_text()
  return page.split(start)[1].split(end)[0]


def _loss_and_seeds(losses: list[float]) -> tuple[str, str]:
  mean = sum(losses) / len(losses)
  ends = f"{min(losses):.4f} to {max(losses):.4f}"
  return f"{mean:.4f} ± {standard_error(losses):.4f}", ends


def test_losses_of_more_replicas_are_those_of_the_committed_runs():
  page = _between("## Under equal conditions", "## Under older rules")
  lines = page.splitlines()
  others = [task for task in REPLICAS if not task.startswith("allreduce")]
  judged = [task for task in others if _judged(task)]
  shown = [line for line in lines if re.match(r"\| \d \|", line)]
  assert sorted(shown) == sorted(map(_row_of_five_seeds, judged))
  tuned = [_row_of_tuning(task) for task in others if task not in judged]
  assert tuned
  assert set(tuned) <= {line.partition("| `")[2] for line in lines}


def _row_of_five_seeds(task: str) -> str:
  best, losses = _best(task), _judged(task)
  cells = [best[key] for key in ("num_replicas", "batch_size", "codec")]
  cells += [f"{float(best[k]):.3g}" for k in ("inner_rate", "outer_rate")]
  cells += [_loss_and_seeds(x)[0] for x in (losses, _judged(_base(task)))]
  cells += [_replicas_gap(task), f"{int(best['sent_bytes']) / 1e6:.3g} MB"]
  return f"| {' | '.join(cells)} |"


def _row_of_tuning(task: str) -> str:
  """What follows the method and H: best rates, losses to choose, the gap."""
  best = _best(task)
  loss, base = (float(_best(t)["loss_choose"]) for t in (task, _base(task)))
  rates = [f"{float(best[k]):.3g}" for k in ("inner_rate", "outer_rate")]
  cells = [best["method"] + "`", best["sync_interval"], best["num_replicas"]]
  gap = f"{100 * (loss / base - 1):+.1f} %"
  cells += [*rates, f"{loss:.4f}", f"{base:.4f}", gap]
  return f"{' | '.join(cells)} |"


def _base(task: str) -> str:
  """AllReduce with as many sequences a step."""
  row = REPLICAS[task][0]
  return f"allreduce b{int(row['num_replicas']) * int(row['batch_size'])}"


def _best(task: str) -> dict[str, str]:
  """The run that tuned best, by the text to choose."""
  tuned = [row for row in REPLICAS[task] if row["seed"] == "1000"]
  return min(tuned, key=lambda row: float(row["loss_choose"]))


def _judged(task: str) -> list[float]:
  """Losses of the seeds 0 to 4 at the best setting; [] if they never ran."""
  best = _best(task)
  rows = [
    row
    for row in REPLICAS[task]
    if row["seed"] != "1000"
    and all(row[k] == best[k] for k in ("inner_rate", "outer_rate"))
  ]
  rows.sort(key=lambda row: row["seed"])
  assert [row["seed"] for row in rows] in ([], list("01234"))
  return [float(row["loss_judge"]) for row in rows]


def _replicas_gap(task: str) -> str:
  own, base = _judged(task), _judged(_base(task))
  by_seed = [a / b - 1 for a, b in zip(own, base, strict=True)]
  return _gap(sum(own) / sum(base) - 1, standard_error(by_seed))


def test_the_page_lists_the_files_that_hold_a_pseudo_gradient():
  page = (ROOT / "docs/notes/pseudo_gradient.md").read_text()
  files = re.findall(r"^\| \d+ \| `(dilocox_jax/\S+)`", page, re.MULTILINE)
  assert len(files) == len(set(files)) <= 10
  assert _files_that_hold_it() == set(files)


def _files_that_hold_it() -> set[str]:
  """Files of functions that have arrays between measure and apply."""
  rounds = dx.make_rounds(
    diloco(1),
    lambda params, state, batch: (params, state, (batch, batch)),
    optax.sgd(1.0),
    num_replicas=2,
    exchange=dx.exchange("low_rank(rank=2)+int(bits=4)", feedback=1.0),
  )
  state = rounds.init({"w": jnp.ones((32, 16)), "b": jnp.ones(5)}, ())
  parts = ("measure", "exchange", "apply")
  outer = {getattr(OuterStep, part).__code__ for part in parts}
  called, depth, root = set(), 0, f"{ROOT}/"

  def note(frame, event, result):
    nonlocal depth
    path = frame.f_code.co_filename.removeprefix(root)
    if not path.startswith("dilocox_jax/"):
      return
    depth += (event == "call") * (frame.f_code in outer)
    if depth and event == "return":
      if _has_array([*frame.f_locals.values(), result]):
        called.add(path)
    depth -= (event == "return") * (frame.f_code in outer)

  before = sys.getprofile()
  sys.setprofile(note)
  try:
    rounds.run(state, jnp.ones((2, 1)))
  finally:
    sys.setprofile(before)
  return called


def _has_array(value) -> bool:
  if isinstance(value, dict):
    return _has_array(list(value.values()))
  if isinstance(value, (list, tuple)):
    return any(map(_has_array, value))
  return isinstance(value, jax.Array)
