"""How a run shows how far it is: as lines, or as a bar."""

import io
import logging
import re
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from dilocox_jax.training import progress
from dilocox_jax.training.progress import ProgressBar, ProgressLog
from dilocox_jax.training.states import TrainingProgress


@pytest.fixture(name="lines")
def lines_fixture(caplog):
  """The lines that are logged."""
  caplog.set_level(logging.INFO, "dilocox_jax")
  return lambda: [record.getMessage() for record in caplog.records]


def wait_for(condition):
  """Waits until a function of a thread has done something."""
  end_s = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < end_s
    time.sleep(0.01)


@pytest.fixture(name="screen")
def screen_fixture():
  """A terminal of 80 columns, whose output can be read."""
  output = io.StringIO()
  console = Console(file=output, force_terminal=True, width=80)

  def text():
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())

  return SimpleNamespace(console=console, text=text)


def test_a_line_comes_at_once_then_every_tenth_or_half_minute(
  lines, monkeypatch
):
  now = [100.0]
  clock = SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(progress, "time", clock)
  log = ProgressLog("diloco", 80, TrainingProgress(8, 800))
  log.leave_out(1.0)
  for step in range(10, 41, 2):
    now[0] += 3.0
    log.update(TrainingProgress(step, 100 * step, 5_000), 2.5, "2 here")
  for step in (41, 41):
    now[0] += 15.0
    log.update(TrainingProgress(step, 100 * step), 2.5, "")
  steps = [re.findall(r"step (\d+) of 80", line)[0] for line in lines()]
  assert steps == ["10", "18", "26", "34", "41"]
  said = "loss 2.500 | 71 tokens/s | sent 5.00 kB | 2 here | 1.4 min left"
  assert lines()[1] == f"diloco: step 18 of 80 | {said}"  # 1.4 s a step.


def test_a_line_says_for_how_long_it_compiles_and_what_is_next(
  lines, monkeypatch
):
  monkeypatch.setattr(progress, "_LOG_S", 0.01)
  log = ProgressLog("diloco", 80, TrainingProgress())
  with log.activity("compiling", "steps 1 to 30 of 80"):
    wait_for(lambda: len(lines()) >= 2)
  num_lines = len(lines())
  assert lines()[0] == "compiling for 0 s; next: steps 1 to 30 of 80"
  time.sleep(0.05)
  assert len(lines()) == num_lines


def test_a_bar_says_what_is_done_and_then_the_loss_and_the_time_left(
  screen, monkeypatch
):
  now = [100.0]
  clock = SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(progress, "time", clock)
  bar = ProgressBar("diloco", 600, TrainingProgress(120, 1_200), screen.console)
  with bar.activity("compiling", "steps 121 to 150 of 600"):
    now[0] += 12.0
    wait_for(lambda: "compiling for 12 s" in screen.text())
  assert "next: steps 121 to 150 of 600" in screen.text()
  bar.leave_out(12.0)
  now[0] += 60.0
  bar.update(TrainingProgress(240, 2_400), 2.5, "")
  bar.close()
  # 120 steps took a minute, and 360 are left.
  last_line = screen.text().rstrip().splitlines()[-1]
  assert "240/600" in last_line
  assert "loss 2.500, 20 tokens/s, 3.0 min left" in last_line
  assert "compiling" not in last_line


def test_a_bar_fits_into_80_columns(screen, monkeypatch):
  now = [100.0]
  clock = SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(progress, "time", clock)
  bar = ProgressBar("overlap_loco", 20_000, TrainingProgress(), screen.console)
  now[0] += 600.0
  bar.update(TrainingProgress(12_000, 10**7), 10.5, "")
  bar.close()
  last_line = screen.text().rstrip().splitlines()[-1]
  assert last_line.strip().startswith("overlap_loco ")
  assert last_line.strip().endswith(
    "loss 10.500, 16,667 tokens/s, 6.7 min left"
  )


def test_log_lines_appear_above_the_bar(screen, monkeypatch):
  stream = io.StringIO()
  monkeypatch.setattr(sys, "stderr", stream)
  handler = logging.StreamHandler(stream)
  logger = logging.getLogger("dilocox_jax")
  logger.addHandler(handler)
  try:
    bar = ProgressBar("diloco", 600, TrainingProgress(), screen.console)
    logger.warning("saving after the segment under way")
    bar.close()
    assert "saving after the segment under way" in screen.text()
    assert not stream.getvalue()
    logger.warning("later")
    assert stream.getvalue() == "later\n"
  finally:
    logger.removeHandler(handler)
