import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from dilocox_jax.plan.pipeline.timeline import Pipeline, TickTimes, timeline
from dilocox_jax.plan.pipeline.timetable import timetable
from dilocox_jax.report.pipeline_chart import (
  DIRECTION_COLOURS,
  IDLE_COLOUR,
  free_chart,
  held_activations,
  lockstep_chart,
  pipeline_figure,
)

TIMES = TickTimes(1, 2)
SCHEDULES = [
  Pipeline("gpipe", 3, 6),
  Pipeline("1f1b", 3, 6),
  Pipeline("interleaved", 3, 6, 2),
  Pipeline("zb_h1", 3, 6),
]
CHARTS = [free_chart, lockstep_chart]


@pytest.mark.parametrize("make", CHARTS)
@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_a_chart_holds_every_entry_of_every_list_in_order(make, pipeline):
  cells = make(pipeline, TIMES).cells
  for stage, order in enumerate(pipeline.orders):
    own = sorted((cell for cell in cells if cell[0] == stage), key=start)
    assert tuple(tick for _, tick, *_ in own) == order


def start(cell):
  return cell[2]


@pytest.mark.parametrize("make", CHARTS)
@pytest.mark.parametrize("pipeline", SCHEDULES)
@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 3))
def test_no_cell_starts_before_what_it_needs_has_arrived(
  make, pipeline, forward_s, backward_s, hop_s
):
  times = TickTimes(forward_s, backward_s, hop_s=hop_s)
  cells = make(pipeline, times).cells
  ends_s = {(stage, tick): at + length for stage, tick, at, length in cells}
  for stage, tick, start_s, length_s in cells:
    assert length_s == pytest.approx(
      times.work_s(tick.direction) / pipeline.chunks_per_stage
    )
    for source, needed in pipeline.dependencies(stage, tick):
      ready_s = ends_s[source, needed] + hop_s * (source != stage)
      assert start_s >= ready_s - 1e-9 * ready_s


@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_a_chart_is_as_long_and_as_idle_as_the_plan_says(pipeline):
  free, lockstep = (make(pipeline, TIMES) for make in CHARTS)
  run = timeline(pipeline, TIMES)
  assert free.step_s == run.step_s
  assert free.idle_fraction == pytest.approx(run.bubble_fraction)
  assert lockstep.step_s == timetable(pipeline).lockstep_step_s(TIMES)
  for chart in (free, lockstep):
    assert chart.step_s == max(at + length for *_, at, length in chart.cells)


def captions(figure):
  return [ax.get_title(loc="left") for ax in figure.axes]


def test_lockstep_has_a_panel_of_its_own_only_where_it_takes_longer():
  figure = pipeline_figure(SCHEDULES, TIMES, "forwards")
  shown = [text.split(":")[0] for text in captions(figure)]
  wanted = []
  for pipeline in SCHEDULES:
    free, lockstep = (make(pipeline, TIMES).step_s for make in CHARTS)
    wanted += [f"{pipeline.name}"] * (2 if lockstep > free else 1)
  assert [text.replace(",", "").split()[0] for text in shown] == wanted
  for text in shown:
    name = text.replace(",", "").split()[0]
    alone = shown.count(text) == 1 and wanted.count(name) == 1
    assert text.endswith("each stage freely or in lockstep") == alone


def test_cells_are_drawn_where_they_lie_in_the_colour_of_their_direction():
  (pipeline,) = chosen = [SCHEDULES[3]]
  (ax,) = pipeline_figure(chosen, TIMES).axes
  drawn = {
    (*patch.get_xy(), patch.get_width(), to_hex(patch.get_facecolor()).upper())
    for patch in ax.patches
    if isinstance(patch, Rectangle)
    and to_hex(patch.get_facecolor()).upper() != IDLE_COLOUR
  }
  assert drawn == {
    (start_s, stage - 0.44, length_s, DIRECTION_COLOURS[tick.direction])
    for stage, tick, start_s, length_s in free_chart(pipeline, TIMES).cells
  }
  below, above = ax.get_ylim()
  assert below > above  # The first stage stands at the top.


def test_cells_name_their_micro_batch_where_there_is_room():
  (ax,) = pipeline_figure([SCHEDULES[0]], TIMES).axes
  numbers = [int(text.get_text()) for text in ax.texts]
  assert sorted(numbers) == sorted([*range(6)] * 2 * 3)
  (full,) = pipeline_figure([Pipeline("gpipe", 2, 400)], TIMES).axes
  assert not full.texts


@pytest.mark.parametrize(
  "pipelines, end",
  [
    (SCHEDULES, "zb_h1 waits least"),
    (SCHEDULES[:2], "work by stage and time"),
    (SCHEDULES[:1], "work by stage and time"),
  ],
)
def test_the_title_names_a_schedule_only_if_it_alone_waits_least(
  pipelines, end
):
  figure = pipeline_figure(pipelines, TIMES)
  assert figure.get_suptitle() == f"3 stages, 6 micro-batches: {end}"


def test_chunks_are_told_apart_and_explained_in_the_legend():
  figure = pipeline_figure([SCHEDULES[2]], TIMES)
  colours = {to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches}
  assert len(colours) == 1 + 2 * 2
  words = [text.get_text() for text in figure.legends[0].get_texts()]
  assert "lighter: later chunk" in words and "input gradient" not in words


def test_held_activations_are_counted_in_whole_stages():
  assert held_activations(SCHEDULES[1]) == "3 2 1"
  whole = Pipeline("interleaved", 1, 4, 2)
  assert held_activations(whole) == "1"
