"""Brings metrics from the devices to the records.

Segments are dispatched without waiting, and their metrics are read here later.
A value that is not finite stops the run here, and here the wall time is divided
between the segments. With several processes all read and check, so that they
stop together, and one writes.
"""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
import optax

from dilocox_jax import metrics
from dilocox_jax.config import RunConfig
from dilocox_jax.config.platforms import chosen_values
from dilocox_jax.distributed import processes
from dilocox_jax.distributed.coordinator_store import arrays_to_host
from dilocox_jax.distributed.link_counter import LinkCounter
from dilocox_jax.outer.drift import Drift
from dilocox_jax.outer.window import StepMetrics
from dilocox_jax.plan.schedule.membership import RoundAttendance
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.training import evaluation
from dilocox_jax.training.build import Programs, platform_name
from dilocox_jax.training.clock import Clock
from dilocox_jax.training.progress_bar import ProgressBar
from dilocox_jax.training.run_text import RunData
from dilocox_jax.training.states import TrainingProgress
from dilocox_jax.training.stops import NotFiniteError


@dataclasses.dataclass(frozen=True)
class DispatchedSegment:
  """A segment whose metrics have not been read yet.

  Attributes:
    segment: The segment that runs.
    progress: How far the run is after the segment.
    metrics: Losses and gradient norms [M, H], still on the devices.
    drifts: Drift of every exchange that it applies, still on the devices.
    exposed_s: Seconds spent waiting for its exchanges; None if not known.
    note: What else the progress line says.
  """

  segment: Segment
  progress: TrainingProgress
  metrics: StepMetrics
  drifts: Sequence[Drift]
  exposed_s: float | None = None
  note: str = ""


class MetricsReader:
  """Reads segments in order and records the time between them.

  Attributes:
    reads_at_once: Whether a segment is to be read as soon as it is dispatched.
  """

  def __init__(
    self,
    recorder: metrics.Recorder,
    bar: ProgressBar,
    schedule: optax.Schedule,
    energy_share: float,
    progress: TrainingProgress,
    is_over_at_once: bool = False,
  ):
    """Starts to measure time.

    Args:
      recorder: Writes the rows.
      bar: Shows how far the run is.
      schedule: Learning rate by inner step.
      energy_share: Share of an update's energy by which its rank is recorded.
      progress: How far the run is before the first segment.
      is_over_at_once: Whether a segment is over once it is dispatched.
    """
    self._recorder, self._bar = recorder, bar
    self._schedule, self._energy_share = schedule, energy_share
    self._recorded_s = time.perf_counter()
    self._start = self._before = progress
    self._training_s = 0.0
    self._link = LinkCounter()
    # The bytes of a segment on a link must not mix with those of the next one.
    self.reads_at_once = is_over_at_once or bool(self._link.interface)

  def record_time(
    self,
    event: str,
    step: int,
    simulated_s: float | None = None,
    tokens: int = 0,
    exposed_s: float | None = None,
  ) -> float:
    """Records the time since the last record under an event.

    Args:
      event: "compile", "round", "evaluation" or "checkpoint".
      step: Inner steps finished.
      simulated_s: Simulated seconds, if the run carries a clock.
      tokens: Tokens that all replicas saw in this time.
      exposed_s: Seconds of it spent waiting for exchanges, if it is known.

    Returns:
      That time (seconds).
    """
    before, self._recorded_s = self._recorded_s, time.perf_counter()
    wall_s = self._recorded_s - before
    self._recorder.record_timing(
      step=step,
      event=event,
      wall_s=wall_s,
      tokens_per_s=tokens / wall_s if tokens else None,
      simulated_s=simulated_s,
      exposed_s=exposed_s,
      link_bytes=self._link.new_bytes(),
    )
    return wall_s

  def record_evaluation(
    self,
    losses: Mapping[str, float | None],
    progress: TrainingProgress,
    num_steps: int | None = None,
  ) -> None:
    """Checks and records validation losses.

    Args:
      losses: Loss of each view, in nats a token; None if it was not computed.
      progress: How far the run is.
      num_steps: For the closing row only: total steps of the run.

    Raises:
      NotFiniteError: If a loss is not finite; nothing is recorded then.
    """
    self.record_time("evaluation", progress.step, progress.simulated_s)
    computed = [loss for loss in losses.values() if loss is not None]
    if not all(map(math.isfinite, computed)):
      raise NotFiniteError(
        f"the validation loss is not finite at step {progress.step}"
      )
    row = {
      **losses,
      "step": progress.step,
      "tokens": progress.tokens,
      "total_sent_bytes": progress.total_sent_bytes,
    }
    self._recorder.record_evaluation(num_steps=num_steps, **row)
    self._before = progress  # What an evaluation sends belongs to no round.

  def check_flush(
    self,
    drifts: Sequence[Drift],
    step: int,
    attendance: RoundAttendance | None = None,
  ) -> None:
    """Checks that what every replica sent in the flush is finite.

    Args:
      drifts: Drifts of the exchanges of the flush, on the devices.
      step: Inner steps of the run.
      attendance: Who takes part in the flush; None: all replicas alike.

    Raises:
      NotFiniteError: One line that names the replica and the step.
    """
    exchanges = arrays_to_host(drifts)
    evaluation.check_drifts(exchanges, [step] * len(exchanges), attendance)

  def read(self, done: DispatchedSegment) -> Sequence[Drift]:
    """Waits for a segment, checks it and records it.

    Returns:
      The drift of every exchange that it applies, on the host.

    Raises:
      NotFiniteError: If a loss, a gradient or what a replica sent is not
        finite; nothing of the segment is recorded then.
    """
    step_metrics, exchanges = arrays_to_host((done.metrics, done.drifts))
    evaluation.check_losses(step_metrics, done.segment)
    start, attendance = done.segment.schedule_start, done.segment.attendance
    events = evaluation.applied_events(done.segment)
    sent_steps = [start + event.send_step for event in events]
    evaluation.check_drifts(exchanges, sent_steps, attendance)
    loss, grad_norm = (
      evaluation.step_means(values, attendance)
      for values in (step_metrics.loss, step_metrics.grad_norm)
    )
    before, progress = self._before, done.progress
    self._before = progress
    self._recorder.record_round(
      step=progress.step,
      tokens=progress.tokens,
      phase=done.segment.phase,
      loss=loss.mean,
      loss_per_replica=loss.by_replica,
      grad_norm=grad_norm.mean,
      learning_rate=float(np.asarray(self._schedule(progress.step - 1))),
      sent_bytes=progress.total_sent_bytes - before.total_sent_bytes,
      total_sent_bytes=progress.total_sent_bytes,
      drift=evaluation.drift_rows(done.segment, exchanges, self._energy_share),
    )
    self._training_s += self.record_time(
      "round",
      progress.step,
      progress.simulated_s,
      progress.tokens - before.tokens,
      done.exposed_s,
    )
    speed = (progress.tokens - self._start.tokens) / self._training_s
    self._bar.update(
      progress.step, loss.mean, speed, progress.total_sent_bytes, done.note
    )
    return exchanges


@contextlib.contextmanager
def open_reader(
  config: RunConfig,
  workdir: pathlib.Path,
  *,
  data: RunData,
  programs: Programs,
  handed_in: Sequence[str],
  command: str,
  progress: TrainingProgress,
  is_resumed: bool,
  writes: bool,
  clock: Clock | None = None,
) -> Iterator[MetricsReader]:
  """Opens the records of a run, from one start of it to its end.

  Args:
    config: Config of the run.
    workdir: The run directory.
    data: What the run is trained and evaluated on.
    programs: Programs of the run.
    handed_in: Names of the parts that the caller handed in, for the record.
    command: The command line, for the record.
    progress: How far the run is.
    is_resumed: Whether a checkpoint was restored.
    writes: Whether this process writes the records.
    clock: Simulated clock of the run, for the record.

  Yields:
    The reader.
  """
  recorder = metrics.SilentRecorder()
  if writes:
    metrics.write_run_record(
      workdir,
      config=config.to_mapping(),
      method=config.sync.method,
      num_replicas=config.mesh.num_replicas,
      parameter_count=programs.parameter_count,
      handed_in=list(handed_in),
      corpus_name=data.name,
      corpus_digest=data.digest,
      bytes_per_token=data.bytes_per_token,
      held_out_digest=data.held_out_digest,
      platform=jax.devices()[0].device_kind,
      chosen=chosen_values(config, platform_name(), "model" in handed_in),
      command=command,
      clock=clock.description if clock else "",
      clock_digest=clock.digest if clock else "",
      continues=is_resumed,
    )
    step_before = progress.step if is_resumed else None
    recorder = metrics.Recorder(workdir, step_before)
  bar = ProgressBar(
    config.sync.method, config.total_steps, progress.step, processes.is_main()
  )
  with recorder, bar:
    yield MetricsReader(
      recorder,
      bar,
      programs.schedule,
      config.adaptive.energy,
      progress,
      is_over_at_once=bool(programs.rounds.thread),
    )
