"""Computes and reports how far replicas are expected to end above AllReduce.

The results of `experiments.gap` are printed and written to a page, and their
numbers to `gap.json`.
"""

import dataclasses
import math
import pathlib
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable

from dilocox_jax.config import RunConfig
from dilocox_jax.gap.law import Estimate
from dilocox_jax.metrics.lines import write_json
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.report import units
from dilocox_jax.report.page import write_page
from dilocox_jax.report.tables import (
  first_that_fits,
  markdown_table,
  terminal_table,
)
from experiments.gaps.measured_gain import MeasuredGain
from experiments.gaps.offers import Offer, offer, sites_of, with_hours
from experiments.gaps.tuned_pairs import Tuned, TunedPair, global_batch

NUMBERS = "gap.json"  # Name of the file of numbers.
NUMBERS_OF_REPLICAS = (2, 4, 8, 16, 32, 64)

_KINDS = {
  "measured": "measured on AllReduce with the planned model",
  "extended": "extended from smaller models of the same shape",
  "given": "from the losses of --losses",
}


class Table(NamedTuple):
  """A table of texts, for the terminal and for the page.

  Attributes:
    header: Names of the columns.
    rows: Cells of each row.
    left: Indices of the columns of text, which a narrow terminal folds; all
      others are numbers.
  """

  header: Sequence[str]
  rows: Sequence[Sequence[str]]
  left: Collection[int] = (0,)


@dataclasses.dataclass(frozen=True)
class Answer:
  """What replicas would cost: everything that the terminal and the page show.

  Attributes:
    config: Config of the planned run.
    gain: s, the share by which AllReduce's loss falls when its batch doubles,
      and the runs behind it.
    offers: Expected gap, bytes and times, by method and number of replicas, the
      planned method first.
    cluster: Name or path of the cluster; None: there is none.
  """

  config: RunConfig
  gain: MeasuredGain
  offers: Mapping[str, Mapping[int, Offer]]
  cluster: str | None

  @property
  def method(self) -> str:
    """Name of the planned method."""
    return self.config.sync.method_name

  @property
  def own_offers(self) -> Mapping[int, Offer]:
    """Offers of the planned method, by number of replicas; may be empty."""
    return self.offers.get(self.method, {})


def answer(
  config: RunConfig,
  gain: MeasuredGain,
  cluster: str | None = None,
  step_s: float | None = None,
) -> Answer:
  """Computes what 2 to 64 replicas would cost with each method.

  Args:
    config: Config of the planned run.
    gain: s, the share by which AllReduce's loss falls when its batch doubles.
    cluster: Name of a preset or path of a cluster file; None: no times. If the
      cluster has a fixed number of replicas, only this number has times.
    step_s: Duration of an inner step of the planned run (seconds); None: it
      follows from the operations of a step and the cluster's devices.

  Raises:
    ValueError: One line, if there is no such cluster, if the planned run does
      not fit on it, or if no gap can be computed for the planned method. For
      example, the method averages gradients, or none of the numbers 2, 4, 8,
      16, 32 and 64 divides the sequences in a step.
  """
  planned_method = config.sync.method_name
  other_methods = [name for name in METHODS if name != planned_method]
  offers: dict[str, dict[int, Offer]] = {}
  num_sites = None if cluster is None else sites_of(cluster)
  for method in [planned_method, *other_methods]:
    offers_of_method: dict[int, Offer] = {}
    for num_replicas in NUMBERS_OF_REPLICAS:
      planned = offer(config, method, num_replicas, gain.gain)
      if planned is None:
        continue
      if cluster is not None and num_sites in (None, num_replicas):
        # A replica with fewer sequences takes a shorter step.
        share = planned.config.data.batch_size / config.data.batch_size
        replica_step_s = None if step_s is None else step_s * share
        planned = with_hours(planned, cluster, replica_step_s, gain.loss)
      offers_of_method[num_replicas] = planned
    if offers_of_method:
      offers[method] = offers_of_method
  if planned_method not in offers:
    raise ValueError(
      f"{global_batch(config)} sequences in a step cannot be divided among 2 to"
      " 64 replicas: change data.batch_size or mesh.num_replicas"
    )
  return Answer(config, gain, offers, cluster)


def report(found: Answer, workdir: pathlib.Path, command: str) -> None:
  """Prints what replicas would cost, and writes the page and `gap.json`.

  The page shows `command`, a command line.
  """
  write_json(workdir / NUMBERS, _numbers(found))
  tables = {
    "Runs of AllReduce": _rate_table(found.gain.pairs),
    f"Expected gap of {found.method}": _own_table(found),
    "Expected gap of every method (%)": _method_table(found),
    f"Time and loss on {found.cluster}": _hours_table(found),
  }
  verdict = _verdict(found)
  sentences = [verdict] if verdict else []
  sentences += _notes(found)
  lines = [_summary(found), ""]
  for title, table in tables.items():
    if table.rows:
      cells = markdown_table(table.header, table.rows)
      lines += [f"## {title}", "", *cells, ""]
  lines += ["## What to keep in mind", ""]
  lines += [f"- {sentence}" for sentence in sentences]
  page = write_page(
    workdir, f"What replicas cost: {found.method}", lines, command
  )
  console = Console()
  print(textwrap.fill(_summary(found), 80))
  for title, table in tables.items():
    if table.rows:
      console.print(_for_terminal(title, table, console))
  for sentence in sentences:
    print(
      textwrap.fill(sentence, 80, initial_indent="- ", subsequent_indent="  ")
    )
  print(f"report: {page}")


def _for_terminal(title: str, table: Table, console: Console) -> RichTable:
  """Returns a table to print, with less space between columns if it is wide."""
  layouts = [
    terminal_table(
      table.header,
      table.rows,
      table.left,
      collapse_padding=is_narrow,
      title=title,
    )
    for is_narrow in (False, True)
  ]
  return first_that_fits(layouts, console)


def _summary(found: Answer) -> str:
  """Returns a sentence that says how much AllReduce gains from its batch."""
  gain = found.gain
  batch = global_batch(found.config)
  half = f"{batch // 2}" if batch % 2 == 0 else f"{batch / 2:g}"
  return (
    f"s = {_share(gain.gain)}: by so much AllReduce's loss falls from {half} to"
    f" {batch} sequences in a step, after {found.config.total_steps:,} steps"
    f" ({_KINDS[gain.kind]})."
  )


def _share(estimate: Estimate) -> str:
  """Returns a share with its range, e.g. "5.9 % (4.0 to 7.8)"."""
  return (
    f"{100 * estimate.value:.1f} % ({100 * estimate.low:.1f} to"
    f" {100 * estimate.high:.1f})"
  )


def _own_table(found: Answer) -> Table:
  """Returns the table of the planned method's gaps, by number of replicas."""
  rows = []
  for number in NUMBERS_OF_REPLICAS:
    planned = found.own_offers.get(number)
    if planned is None:
      rows.append([str(number), "-", "-", "-", "-", "-"])
      continue
    gap = planned.expected
    rows.append(
      [
        str(number),
        str(planned.config.data.batch_size),
        str(planned.config.sync.named.schedule.sync_interval),
        f"{100 * gap.gap:+.1f} %",
        f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}",
        units.human_bytes(planned.sent_bytes),
      ]
    )
  return Table(("M", "sequences", "H", "gap", "range", "sent"), rows)


def _hours_table(found: Answer) -> Table:
  """Returns the table of the planned method's times and losses on the cluster.

  Its rows are the numbers of replicas whose times were computed.
  """
  has_loss = math.isfinite(found.gain.loss)
  header = ["M", "time", "AllReduce"]
  if has_loss:
    header += ["loss", "range", "alone", "worth it"]
  rows = []
  for number, planned in found.own_offers.items():
    hours = planned.hours
    if hours is None:
      continue
    row = [
      str(number),
      units.human_time(hours.time_s),
      units.human_time(hours.allreduce_s),
    ]
    if has_loss:
      row += [
        f"{hours.loss.value:.3f}",
        f"{hours.loss.low:.3f} to {hours.loss.high:.3f}",
        f"{hours.alone_loss:.3f}",
        hours.verdict,
      ]
    rows.append(row)
  return Table(header, rows)


def _method_table(found: Answer) -> Table:
  """Returns the table of the expected gaps of all methods (per cent).

  H and the bytes of a method are those of its run with the fewest replicas.
  """
  numbers = [
    number for number in NUMBERS_OF_REPLICAS if number in found.own_offers
  ]
  header = ["method", "H", *(f"M={number}" for number in numbers)]
  header.append("sent")
  rows = []
  for method, by_number in found.offers.items():
    first = by_number[min(by_number)]
    schedule = first.config.sync.named.schedule
    gaps = [
      f"{100 * by_number[number].expected.gap:+.1f}"
      if number in by_number
      else "-"
      for number in numbers
    ]
    rows.append(
      [
        method,
        str(schedule.sync_interval),
        *gaps,
        units.human_bytes(first.sent_bytes),
      ]
    )
  return Table(header, rows)


def _rate_table(pairs: Sequence[TunedPair]) -> Table:
  """Returns the table of the runs of AllReduce that were trained."""
  header = ["parameters", "B", "steps", "best rate", "of", "loss", "refined"]
  rows = []
  for pair in pairs:
    for batch in (pair.half, pair.full):
      rows.append(
        [
          f"{pair.parameters:,}",
          str(batch.batch),
          f"{pair.steps:,}",
          f"{batch.rate:g}",
          ", ".join(f"{rate:g}" for rate in sorted(batch.losses)),
          f"{batch.loss:.4f}",
          f"{batch.refined:.4f}",
        ]
      )
  # Only the rates that were tried may be folded: they have no bound.
  return Table(header, rows, left=(header.index("of"),))


def _verdict(found: Answer) -> str:
  """Returns a sentence that says whether several clusters are worth it.

  It is about the smallest number of clusters (of one replica each) whose times
  were computed; "" without times, or if AllReduce's loss is not known.
  """
  words = {
    "yes": "are worth it",
    "no": "are not worth it",
    "not known": "may be worth it or not",
  }
  for number, planned in found.own_offers.items():
    hours = planned.hours
    if hours is not None and math.isfinite(hours.loss.value):
      return (
        f"{number} clusters {words[hours.verdict]}: after"
        f" {units.human_time(hours.time_s)} they reach a loss of"
        f" {hours.loss.value:.3f} ({hours.loss.low:.3f} to"
        f" {hours.loss.high:.3f}), and one cluster alone"
        f" {hours.alone_loss:.3f}."
      )
  return ""


def _notes(found: Answer) -> Iterator[str]:
  """Yields sentences that say how far to trust the expected gaps."""
  for pair in found.gain.pairs:
    for batch in (pair.half, pair.full):
      if not batch.is_inner:
        yield _end_note(pair, batch)
  if found.gain.kind == "extended":
    sizes = ", ".join(f"{pair.parameters:,}" for pair in found.gain.pairs)
    yield (
      f"s was measured with {sizes} parameters and extended to"
      f" {parameter_count(found.config.model.shape):,} by its power of the"
      " number of parameters. Batch and steps of the smaller runs shrink as the"
      " root of the parameters, so tokens for each parameter stay. The range"
      " covers the fitted power, no power, and the third root of published"
      " runs."
    )
  if found.gain.kind != "given" and found.gain.pairs[0].num_seeds == 1:
    yield "s comes from one seed; --seeds=3 narrows its range."
  if found.gain.kind == "given":
    yield (
      "The losses count as those of one seed, each at the best rate of its"
      " batch."
    )
  notes = dict.fromkeys(
    note
    for by_number in found.offers.values()
    for planned in by_number.values()
    for note in planned.expected.notes
  )
  yield from notes
  fewest = min(found.own_offers)
  yield (
    "Bytes are those of one replica in the whole run (derived), in the table of"
    f" methods with M = {fewest}."
  )
  yield (
    "The gap is expected beside AllReduce with as many sequences in a step and"
    " as many steps, all at their best rates (fitted to small models;"
    " docs/guides/what_replicas_cost.md)."
  )
  if found.cluster is not None:
    yield (
      "Times are simulated. One cluster alone takes the better of two ways in"
      " the time of the others: fewer steps, or fewer sequences in a step"
      " (derived)."
    )


def _end_note(pair: TunedPair, batch: Tuned) -> str:
  """Returns a warning that the best rate is the lowest or highest one tried."""
  return (
    f"The best rate with {pair.parameters:,} parameters and {batch.batch}"
    f" sequences, {batch.rate:g}, is at an end of those tried: raise --rates,"
    " or change inner.learning_rate."
  )


def _numbers(found: Answer) -> dict[str, Any]:
  """Returns the content of `gap.json`."""
  config = found.config
  return {
    "gain": dataclasses.asdict(found.gain.gain),
    "kind": found.gain.kind,
    "batch": global_batch(config),
    "steps": config.total_steps,
    "parameters": parameter_count(config.model.shape),
    "loss": found.gain.loss if math.isfinite(found.gain.loss) else None,
    "gaps": {
      method: {
        str(number): {
          "gap": planned.expected.gap,
          "low": planned.expected.low,
          "high": planned.expected.high,
          "doublings": dataclasses.asdict(planned.expected.doublings),
          "sync_interval": planned.config.sync.named.schedule.sync_interval,
          "sent_bytes": planned.sent_bytes,
          "time_s": None if planned.hours is None else planned.hours.time_s,
        }
        for number, planned in by_number.items()
      }
      for method, by_number in found.offers.items()
    },
  }
