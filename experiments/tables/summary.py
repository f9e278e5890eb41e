"""What the papers' tables come to, in at most fifteen lines."""

from collections.abc import Iterator, Sequence

from experiments.tables.table import Fit, Prediction, Table, short

# Paper, table, names of figures (two are the ends of a range), and what readers
# see of them.
_SHOWN = (
  (
    "DiLoCoX",
    "dilocox_throughput",
    (
      ("107B AllReduce, tokens/s", "107B, AllReduce, throughput"),
      ("107B speed-up, times", "107B, speed-up over AllReduce"),
      (
        "107B not compressed, tok/s",
        "107B, DiLoCoX without compression, throughput",
      ),
      ("OPT-1.3B speed-up, times", "OPT-1.3B, speed-up over AllReduce"),
    ),
  ),
  (
    "Streaming",
    "streaming_diloco_table_1",
    (
      (
        "data parallel 1 Gbit/s, h",
        "table 1, Data-Parallel, hours at 1 Gbit/s",
      ),
      (
        "overlap, FP4, 1 Gbit/s, h",
        "table 1, Streaming + overlap, FP4, hours at 1 Gbit/s",
      ),
    ),
  ),
  (
    "OpenDiLoCo",
    "open_diloco",
    (("utilisation, %", "utilisation, lowest", "utilisation, highest"),),
  ),
  (
    "INTELLECT-1",
    "intellect_1",
    (
      ("USA and Europe, %", "USA and Europe, utilisation"),
      ("fewer bytes, times", "bandwidth reduction"),
    ),
  ),
  ("Covenant-72B", "covenant_72b", (("utilisation, %", "utilisation"),)),
)
_CELLS = "streaming_diloco_table_4"
_LINE = "{:<12} {:<26} {:>9} {:>9} {:>8} {}"
_HEADER = ("paper", "figure", "published", "predicted", "error", "kind")
_KINDS = {Fit.NONE: "derived", Fit.HERE: "fitted", Fit.ELSEWHERE: "by others"}
_FOOTNOTE = "* recalled. fitted: on this figure; by others: on its others."


def summary(tables: Sequence[Table]) -> list[str]:
  """Returns the lines that a terminal shows of the tables of papers."""
  by_name = {table.name: table for table in tables}
  lines = [_LINE.format(*_HEADER), "-" * 80]
  for paper, name, figures in _SHOWN:
    rows = by_name[name].rows if name in by_name else ()
    for label, *names in figures if rows else ():
      found = [next(r for r in rows if r.name == each) for each in names]
      lines.append(_LINE.format(paper, label, *_cells(found)))
  if _CELLS in by_name:
    cells = _cell_counts(by_name[_CELLS])
    lines.append(_LINE.format("Streaming", "bandwidths, exact cells", *cells))
  return [*lines, _FOOTNOTE] if len(lines) > 2 else []


def _cells(rows: Sequence[Prediction]) -> Iterator[str]:
  figures = [row.published for row in rows if row.published]
  values = [figure.value for figure in figures]
  is_read = all(figure.is_verified for figure in figures)
  yield "-".join(f"{v:g}" for v in values) + ("" if is_read else "*")
  yield short(rows[0].predicted)
  is_within = min(values) <= rows[0].predicted <= max(values)
  yield rows[0].error if len(rows) == 1 else ("no", "within")[is_within]
  yield _KINDS[rows[0].kind]


def _cell_counts(table: Table) -> tuple[str, ...]:
  """Returns how many cells of a grid are met, as the cells of one line."""
  steps = [
    abs(row.grid_steps) for row in table.rows if row.grid_steps is not None
  ]
  exact = str(steps.count(0))
  return str(len(steps)), exact, f"{max(steps)} step", _KINDS[Fit.HERE]
