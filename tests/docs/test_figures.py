"""The pictures of the pages are those that their scripts draw."""

import re

import pytest

from docs.figures import loss_by_bytes, schedules
from tests.docs.committed_runs import ROOT, equal

CONCEPTS = (ROOT / "docs/concepts.md").read_text()
PICTURES = {picture.file: picture for picture in schedules.pictures()}


@pytest.mark.parametrize("file", PICTURES)
def test_a_committed_schedule_is_what_the_script_draws(file):
  committed = (ROOT / "docs/figures" / file).read_text()
  assert schedules.svg(PICTURES[file]) == committed


@pytest.mark.parametrize("file", PICTURES)
def test_the_page_of_concepts_shows_each_schedule(file):
  assert f"](figures/{file})" in CONCEPTS


def transfers_of(name):
  picture = PICTURES[f"schedule_{name}.svg"]
  return schedules.transfers(picture.schedule, picture.num_steps)


def test_diloco_waits_for_the_whole_model_after_each_round():
  sent = [(each.send_step, each.apply_step) for each in transfers_of("diloco")]
  assert sent == [(6, 6), (12, 12)]


def test_the_link_of_overlap_loco_has_no_pause():
  transfers = transfers_of("overlap_loco")
  ends = [transfer.apply_step for transfer in transfers[:-1]]
  starts = [transfer.send_step for transfer in transfers[1:]]
  assert ends == starts


def test_no_word_is_defined_twice():
  words = re.findall(r"^- \*\*(.+?)\*\*", CONCEPTS, re.MULTILINE)
  assert len(words) > 30
  assert len(words) == len({word.lower() for word in words})


def test_points_of_loss_and_bytes_are_those_of_the_table():
  runs = equal()
  for point in loss_by_bytes.read():
    _, name = loss_by_bytes.SETTINGS[point.method]
    setting = runs.setting(name)
    assert point.loss == pytest.approx(setting.loss)
    assert point.sent_bytes == setting.sent_bytes
