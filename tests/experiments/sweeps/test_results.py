import csv
import dataclasses
import math
import pathlib

import pytest

from dilocox_jax import report
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.mapping import flat
from dilocox_jax.metrics import RecordError
from experiments.configs import convergence_small
from experiments.runtime.command_line import TRY_AGAIN, StoppedError
from experiments.sweeps.required_runs import RequiredRuns
from experiments.sweeps.results import (
  CurveRow,
  ResultRow,
  Results,
  evaluations,
  row_of,
)
from experiments.sweeps.sweep_spec import sweep
from tests import runs

BASE = flat(RunConfig().to_mapping())
TEXT = "feedfacefeedface"


def row(digest="a", **changed):
  changed = {"judge_loss": 1.25, **changed}
  made = ResultRow(
    *("results", "diloco", 0, digest, TEXT, '{"x": "1, 2"}', 24, 100, 7),
    *(1 / 3, 0.4, math.inf, 1.5, "cpu", "3.11", "0.10"),
  )
  return dataclasses.replace(made, **changed)


def curve(digest="a"):
  return [
    CurveRow(digest, TEXT, step, 4 * step, 5 * step, 0.1 * step, step == 3)
    for step in (1, 2, 3)
  ]


@pytest.fixture(name="path")
def path_fixture(tmp_path):
  return tmp_path / "docs" / "results" / "nano.csv"


def test_what_is_kept_is_read_back_to_the_last_bit(path):
  Results(path, BASE).add(row(), curve())
  found = Results(path, BASE)
  assert found.rows == {("a", TEXT): row()}
  assert found.curve(("a", TEXT)) == curve()
  assert found.curve(("b", TEXT)) == []


def test_a_diverged_run_is_kept_with_its_reason(path):
  Results(path, BASE).add(
    row(final_loss=math.nan, failure='"hot", not finite'), []
  )
  (found,) = Results(path, BASE).rows.values()
  assert math.isnan(found.final_loss) and found.failure == '"hot", not finite'


@pytest.mark.parametrize("which", ["path", "curves_path"])
def test_a_torn_tail_is_ignored_and_then_cut(path, which):
  results = Results(path, BASE)
  results.add(row(), curve())
  torn = getattr(results, which)
  whole = torn.read_bytes()
  torn.write_bytes(whole + b"torn,li")
  found = Results(path, BASE)
  assert (
    found.rows.keys() == {("a", TEXT)} and len(found.curve(("a", TEXT))) == 3
  )
  found.add(row("b"), curve("b"))
  after = torn.read_bytes()
  assert after.startswith(whole) and b"torn" not in after[len(whole) :]
  again = Results(path, BASE)
  assert again.rows.keys() == {("a", TEXT), ("b", TEXT)}
  assert again.curve(("b", TEXT)) == curve("b")


def test_a_curve_written_twice_counts_once(path):
  results = Results(path, BASE)
  results.add(row(), curve())
  results.add(row(), curve())  # As after a kill between the two files.
  assert Results(path, BASE).curve(("a", TEXT)) == curve()


def test_a_line_of_before_the_last_columns_is_read_and_stays_as_it_is(path):
  """The committed lines name no revision and no cores."""
  path.parent.mkdir(parents=True)
  names = [field.name for field in dataclasses.fields(ResultRow)][:-3]
  plain = row(changed="{}", judge_loss=math.nan)
  line = ",".join(str(getattr(plain, name)) for name in names)
  path.write_text(",".join(names) + "\n" + line + "\n")
  results = Results(path, BASE)
  (old,) = results.rows.values()
  assert old == plain and (old.revision, old.cores) == ("", 0)
  new = row("b", revision="abc-dirty", cores=2)
  results.add(new, [])
  header, first, _ = path.read_text().splitlines()
  assert header.endswith("failure,revision,cores,judge_loss") and first == line
  rows = Results(path, BASE).rows
  assert rows == {("a", TEXT): old, ("b", TEXT): new}


def test_a_sweep_may_begin_with_lines_that_it_leaves_as_they_are(path):
  start = path.with_name("start.csv")
  before = {k: v for k, v in BASE.items() if k != "model.z_loss"}
  Results(start, before).add(row(), curve())
  files = {p.name: p.read_bytes() for p in path.parent.iterdir()}
  results = Results(path, BASE, start)
  assert results.source == start and results.rows.keys() == {("a", TEXT)}
  assert results.curve(("a", TEXT)) == curve() and not path.exists()
  # The digests are still those of the fields there were.
  assert results.digest(RunConfig()) == Results(start, BASE).digest(RunConfig())
  results.add(row("b"), curve("b"))
  assert results.source == path
  again = Results(path, BASE, start)
  assert again.rows.keys() == {("a", TEXT), ("b", TEXT)}
  assert again.curve(("a", TEXT)) == curve()
  assert again.digest(RunConfig()) == results.digest(RunConfig())
  for name, content in files.items():
    assert path.with_name(name).read_bytes() == content


def test_a_second_sweep_on_the_same_file_is_refused(path):
  first, second = Results(path, BASE), Results(path, BASE)
  with first.held():
    with pytest.raises(StoppedError, match=r"another sweep .*nano.csv") as e:
      with second.held():
        pass
    assert e.value.exit_code == TRY_AGAIN
    first.add(row(), curve())
  with second.held():
    pass


def test_looking_at_results_writes_nothing(path):
  assert Results(path, BASE).rows == {} and not path.parent.exists()


def test_a_file_of_another_kind_is_refused_in_one_line(path):
  path.parent.mkdir(parents=True)
  path.write_text("a,b\n1,2\n")
  with pytest.raises(RecordError, match="nano.csv line 2 is no ResultRow"):
    Results(path, BASE)


def test_a_field_that_came_later_counts_only_where_it_is_set(path):
  before = {k: v for k, v in BASE.items() if k != "model.z_loss"}
  results = Results(path, before)
  config = from_mapping({})
  known = results.digest(config)
  with results.held():
    pass
  # The file remembers which fields there were when it was begun.
  assert Results(path, BASE).digest(config) == known
  changed = from_mapping({"model": {"z_loss": 0.1}})
  assert Results(path, BASE).digest(changed) != known
  assert Results(path.with_name("new.csv"), BASE).digest(config) != known


def kept(config, workdir, path):
  """A run made from the start, and the bytes of its lines."""
  runs.train(config, workdir)
  run = report.load_run(workdir)
  results = Results(path, BASE)
  digest = results.digest(config)
  line = row_of(
    run,
    stage="results",
    method="diloco",
    seed=config.seed,
    digest=digest,
    changed="{}",
    total_steps=config.total_steps,
  )
  results.add(dataclasses.replace(line, wall_s=0.0), evaluations(run, digest))
  return path.read_bytes(), results.curves_path.read_bytes()


@pytest.mark.slow
def test_a_seeds_curve_is_reproduced_bit_for_bit_by_running_again(tmp_path):
  config = runs.settings(method="diloco")
  first = kept(config, tmp_path / "one", tmp_path / "one.csv")
  again = kept(config, tmp_path / "two", tmp_path / "two.csv")
  assert first == again
  assert first[1].count(b"\n") == 5  # Header, steps 6, 12, 18, the flush.


@pytest.mark.slow
def test_lines_that_are_kept_still_count():
  """Hours of work hang on twelve digits that follow from every field."""
  small = sweep(convergence_small.get_config().to_dict())
  kept = pathlib.Path(__file__).parents[3] / "docs/results"
  results = Results(kept / "convergence_small.csv", small.base)
  digests = {digest for digest, _ in results.rows}
  plan = RequiredRuns(small)
  # Where H follows from a clock, it may have changed for good reason.
  own = [m for m in small.methods if not (m.tau_from or m.interval_of)]
  assert len(own) > 9
  for method in own:
    for planned in plan.tune_inner(method):
      assert results.digest(planned.config) in digests, planned.changed


def test_columns_in_another_order_are_refused(path):
  Results(path, BASE).add(row(), curve())
  header, line = path.read_text().splitlines()
  names, values = header.split(","), next(csv.reader([line]))
  with path.open("w") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([names[::-1], values[::-1]])
  with pytest.raises(RecordError, match="columns in another order"):
    Results(path, BASE)


def test_what_is_damaged_is_refused_in_one_line(path):
  results = Results(path, BASE)
  results.add(row(), curve())
  curves = results.curves_path.read_text()
  results.curves_path.write_text(curves.replace("True", "TRUE"))
  with pytest.raises(RecordError, match="is no CurveRow"):
    Results(path, BASE)
  results.curves_path.write_text(curves)
  base = path.with_name(f"{path.stem}_base.json")
  base.write_text(base.read_text()[:-5])
  with pytest.raises(RecordError, match="base.json is damaged"):
    Results(path, BASE)
