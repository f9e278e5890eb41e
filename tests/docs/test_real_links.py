"""The table of `docs/results/links.md` is that of the measured rows."""

import pytest

from tests.docs.committed_runs import ROOT, links

PAGE = (ROOT / "docs/results/links.md").read_text()
RATES_BPS = (1e9, 2e8, 5e7)
ROWS = [row for row in links() if "tokens_per_step" in row]
METHODS = list(
  dict.fromkeys((row["name"], row["sync_interval"]) for row in ROWS)
)
# What the page says of a method besides its name and H.
DETAILS = {
  "streaming_diloco": ", P = 4",
  "overlap_loco": ", P = 4",
  "dilocox": ", rank 32",
}
WITHOUT_ROUNDS = ("allreduce", "cocktail_sgd")


def row_of(name, rate_bps, interval=None):
  (row,) = [
    row
    for row in ROWS
    if row["name"] == name
    and row["rate_bps"] == rate_bps
    and interval in (None, row["sync_interval"])
  ]
  return row


def cell(row):
  base = row_of("allreduce", row["rate_bps"])
  tokens = row["tokens_per_step"] / row["measured_s"]
  measured = base["measured_s"] / row["measured_s"]
  simulated = base["predicted_s"] / row["predicted_s"]
  return f"{tokens:,.0f} ({measured:.1f}; {simulated:.1f})"


@pytest.mark.parametrize(("name", "interval"), METHODS)
def test_a_row_of_the_table_is_what_was_measured(name, interval):
  label = f"`{name}`"
  if name not in WITHOUT_ROUNDS:
    label += f", H = {interval}{DETAILS.get(name, '')}"
  cells = [cell(row_of(name, rate, interval)) for rate in RATES_BPS]
  assert f"| {label} | {' | '.join(cells)} |" in PAGE


def test_four_of_thirty_predictions_miss_by_more_than_five_per_cent():
  errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in ROWS]
  assert len(errors) == 30
  assert sum(error > 0.05 for error in errors) == 4
  assert "Twenty-six of thirty predictions are within 5 %." in PAGE
