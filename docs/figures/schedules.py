"""Draws when four methods train, send and apply, for `docs/concepts.md`.

  python -m docs.figures.schedules

The steps of the events are those of the methods' own schedules. How long a
replica of DiLoCo waits is an assumption (`WAIT_STEPS`). Each picture is an SVG
file beside this one.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule

FOLDER = pathlib.Path(__file__).parent
DRAWN_STEPS = 18  # Width of each picture: the time of 18 inner steps.
WAIT_STEPS = 3  # A replica that waits for the link waits as long as 3 steps.

# Sizes in pixels.
_LEFT = 92  # Width of the names of the lanes.
_STEP = 34
_LANE = 26
_GAP = 10
_LINK_GAP = 20  # Space above the link, for the arrows.
_TOP = 34
_BOTTOM = 34
_STEP_COLOR = "#DCE6EE"
_WAIT_COLOR = "#F4F4F4"
_TEXT_COLOR = "#333333"
# A color for each fragment; people with impaired color vision can tell them
# apart.
_FRAGMENT_COLORS = ("#0072B2", "#D55E00", "#009E73")


@dataclasses.dataclass(frozen=True)
class Picture:
  """One picture.

  Attributes:
    file: Name of the SVG file.
    title: Line above the lanes.
    schedule: The schedule whose events are drawn.
    num_steps: Number of inner steps that a replica does in the picture.
  """

  file: str
  title: str
  schedule: SyncSchedule
  num_steps: int


@dataclasses.dataclass(frozen=True)
class Transfer:
  """One fragment on the link.

  Attributes:
    fragment: Index of the fragment, from 0.
    send_step: Inner step after which the fragment is sent.
    apply_step: Inner step after which the result is applied.
  """

  fragment: int
  send_step: int
  apply_step: int


def pictures() -> list[Picture]:
  """Returns the four pictures, with H = 6 in each."""
  named = {
    "diloco": ("DiLoCo", methods.diloco(6)),
    "streaming_diloco": (
      "Streaming DiLoCo",
      methods.streaming_diloco(6, num_fragments=3, overlap_steps=1),
    ),
    "dilocox": ("DiLoCoX", methods.dilocox(6)),
    "overlap_loco": ("overlap_loco", methods.overlap_loco(6, num_fragments=3)),
  }
  result = []
  for file, (name, method) in named.items():
    schedule = method.schedule
    numbers = (
      f"H = {schedule.sync_interval}, P = {schedule.num_fragments},"
      f" tau = {schedule.overlap_steps}"
    )
    result.append(
      Picture(
        file=f"schedule_{file}.svg",
        title=f"{name}: {numbers}",
        schedule=schedule,
        num_steps=_steps_within(schedule),
      )
    )
  return result


def _steps_within(schedule: SyncSchedule) -> int:
  """Returns how many inner steps a replica does in a picture."""
  if schedule.overlap_steps:
    return DRAWN_STEPS
  # Each round ends with a wait.
  round_steps = schedule.sync_interval + WAIT_STEPS
  return DRAWN_STEPS // round_steps * schedule.sync_interval


def transfers(schedule: SyncSchedule, num_steps: int) -> list[Transfer]:
  """Returns the transfers that begin within some inner steps, in order.

  Args:
    schedule: The schedule.
    num_steps: Number of inner steps.
  """
  return [
    Transfer(
      fragment=event.fragment,
      send_step=event.step,
      apply_step=event.step + schedule.overlap_steps,
    )
    for event in schedule.events(0, num_steps)
    if event.kind == "send"
  ]


class _Axis:
  """Horizontal pixels of inner steps, with the waits between them."""

  def __init__(self, picture: Picture):
    self._waits_after = set()
    if picture.schedule.overlap_steps == 0:
      sends = transfers(picture.schedule, picture.num_steps)
      self._waits_after = {transfer.send_step for transfer in sends}

  def start_of(self, step: int) -> float:
    """Left end of an inner step, from 1."""
    waits = sum(each < step for each in self._waits_after)
    return _LEFT + _STEP * (step - 1 + WAIT_STEPS * waits)

  def end_of(self, step: int) -> float:
    """Right end of an inner step; for step 0 the begin of the run."""
    if step == 0:
      return _LEFT
    return self.start_of(step) + _STEP

  def end_of_wait(self, step: int) -> float:
    """Right end of the wait after an inner step, or of the step itself."""
    if step in self._waits_after:
      return self.end_of(step) + _STEP * WAIT_STEPS
    return self.end_of(step)

  @property
  def waits(self) -> list[int]:
    """The inner steps after which a replica waits."""
    return sorted(self._waits_after)


def svg(picture: Picture) -> str:
  """Returns a picture as the text of an SVG file."""
  axis = _Axis(picture)
  width = round(axis.end_of_wait(picture.num_steps) + 16)
  height = _lane_top(2) + _LANE + _BOTTOM
  lines = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    f' width="{width}" height="{height}" font-family="sans-serif"'
    ' font-size="13">',
    f"<title>{picture.title}</title>",
    _ARROW_HEAD,
    f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>',
    _text(8, 20, picture.title, extra=' font-weight="bold"'),
  ]
  for lane, name in enumerate(("replica 1", "replica 2", "link")):
    lines.append(_text(8, _lane_top(lane) + 18, name))
  for lane in (0, 1):
    lines += _steps(picture, axis, _lane_top(lane))
  lines += _link(picture, axis)
  lines.append(
    _text(
      8,
      height - 10,
      "arrow down: sends its pseudo-gradient; arrow up: applies the average",
      extra=' font-size="12" fill-opacity="0.8"',
    )
  )
  lines.append("</svg>")
  return "\n".join(lines) + "\n"


_ARROW_HEAD = (
  '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5"'
  ' markerWidth="7" markerHeight="7" orient="auto">'
  f'<path d="M0 0L10 5L0 10z" fill="{_TEXT_COLOR}"/></marker></defs>'
)


def _lane_top(lane: int) -> int:
  """Returns the top of a lane: 0 and 1 are the replicas, 2 is the link."""
  top = _TOP + lane * (_LANE + _GAP)
  if lane == 2:
    top += _LINK_GAP - _GAP
  return top


def _text(x: float, y: float, words: str, extra: str = "") -> str:
  return f'<text x="{x:g}" y="{y:g}" fill="{_TEXT_COLOR}"{extra}>{words}</text>'


def _box(left: float, right: float, top: int, color: str, words: str) -> str:
  """Returns a box of a lane with words in its middle."""
  is_dark = color in _FRAGMENT_COLORS
  text_color = "#FFFFFF" if is_dark else _TEXT_COLOR
  return (
    f'<rect x="{left + 1:g}" y="{top}" width="{right - left - 2:g}"'
    f' height="{_LANE}" rx="3" fill="{color}"/>'
    f'<text x="{(left + right) / 2:g}" y="{top + 17}" text-anchor="middle"'
    ' font-size="12"'
    f' fill="{text_color}">{words}</text>'
  )


def _steps(picture: Picture, axis: _Axis, top: int) -> Iterator[str]:
  """Yields the inner steps of a replica, and where it waits."""
  for step in range(1, picture.num_steps + 1):
    left = axis.start_of(step)
    yield _box(left, axis.end_of(step), top, _STEP_COLOR, str(step))
  for step in axis.waits:
    left = axis.end_of(step)
    yield _box(left, axis.end_of_wait(step), top, _WAIT_COLOR, "waits")


def _link(picture: Picture, axis: _Axis) -> Iterator[str]:
  """Yields the fragments on the link, with an arrow to and from each."""
  schedule = picture.schedule
  num_steps = picture.num_steps
  link_top = _lane_top(2)
  replica_bottom = _lane_top(1) + _LANE
  for transfer in transfers(schedule, num_steps):
    if schedule.overlap_steps and transfer.send_step == num_steps:
      continue  # It is sent at the right edge of the picture.
    left = axis.end_of(transfer.send_step)
    if schedule.overlap_steps == 0:
      right = axis.end_of_wait(transfer.send_step)
    else:
      right = axis.end_of(min(transfer.apply_step, num_steps))
    color = _FRAGMENT_COLORS[transfer.fragment]
    if schedule.num_fragments == 1:
      words = "whole model"
    elif right - left < 2 * _STEP:
      words = str(transfer.fragment)
    else:
      words = f"fragment {transfer.fragment}"
    yield _box(left, right, link_top, color, words)
    yield _arrow(left + 5, replica_bottom, link_top)
    if transfer.apply_step <= num_steps:
      yield _arrow(right - 5, link_top, replica_bottom)


def _arrow(x: float, start: int, stop: int) -> str:
  """Returns a vertical arrow."""
  return (
    f'<line x1="{x:g}" y1="{start}" x2="{x:g}" y2="{stop}"'
    f' stroke="{_TEXT_COLOR}" stroke-width="1.5" marker-end="url(#head)"/>'
  )


def main() -> None:
  """Writes the four pictures beside this file."""
  for picture in pictures():
    (FOLDER / picture.file).write_text(svg(picture))


if __name__ == "__main__":
  main()
