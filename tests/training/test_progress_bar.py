import io
import logging
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from dilocox_jax.training import progress_bar
from dilocox_jax.training.progress_bar import ProgressBar


@pytest.fixture(name="lines")
def lines_fixture(caplog):
  """The lines logged where there is no terminal."""
  caplog.set_level(logging.INFO, "dilocox_jax")
  return lambda: [record.getMessage() for record in caplog.records]


def test_without_a_terminal_a_line_comes_at_once_and_every_tenth(lines):
  with ProgressBar("diloco", 80) as progress:
    for step in range(2, 81, 2):
      progress.update(step, 2.5, 1_234.0, step * 1_920)
  steps = [line.partition(" of ")[0] for line in lines()]
  assert steps == [f"diloco: step {step}" for step in range(2, 81, 8)]
  assert lines()[1] == (
    "diloco: step 10 of 80 | loss 2.500 | 1,234 tokens/s | sent 19.2 kB"
  )


def test_without_a_terminal_no_bar_is_drawn(capsys):
  with ProgressBar("diloco", 80) as progress:
    progress.update(80, 2.5, 1_234.0, 0)
  assert not capsys.readouterr().out


def test_a_slow_run_is_heard_of_every_half_minute(lines, monkeypatch):
  now = [100.0]
  clock = SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(progress_bar, "time", clock)
  with ProgressBar("diloco", 1000) as progress:
    for step in range(1, 7):
      progress.update(step, 2.5, 1.0, 0)
      now[0] += 10
  assert [line.split()[2] for line in lines()] == ["1", "4"]


def test_a_run_that_goes_on_counts_from_where_it_was(lines):
  with ProgressBar("diloco", 80, first_step=40) as progress:
    for step in (45, 50, 53):
      progress.update(step, 2.5, 1.0, 0)
  assert [line.split()[2] for line in lines()] == ["45", "53"]


@pytest.mark.parametrize("width", [80, 120])
def test_on_a_terminal_the_bar_says_it_all_and_nothing_is_logged(
  lines, monkeypatch, width
):
  out = io.StringIO()
  console = Console(file=out, force_terminal=True, width=width)
  monkeypatch.setattr(progress_bar, "get_console", lambda: console)
  with ProgressBar("overlap_loco", 800) as progress:
    progress.update(600, 2.5, 12_345.0, 3_000_000)
  shown = Text.from_ansi(out.getvalue()).plain
  assert "…" not in shown
  for part in ("overlap_loco", "600/800", "loss 2.500", "12,345 tokens/s"):
    assert part in shown
  assert "3.00 MB" in shown and "left" in shown
  assert not lines()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_hidden_bar_shows_and_logs_nothing(lines, monkeypatch, is_terminal):
  out = io.StringIO()
  console = Console(file=out, force_terminal=is_terminal)
  monkeypatch.setattr(progress_bar, "get_console", lambda: console)
  with ProgressBar("diloco", 80, is_shown=False) as progress:
    progress.update(60, 2.5, 1_234.0, 3_000_000)
  assert not out.getvalue() and not lines()
