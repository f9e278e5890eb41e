"""Brings metrics from the devices to the records and to the log.

Segments are dispatched without waiting, and their metrics are read here later.
A value that is not finite stops the run here. With several processes all read
and check, so that they stop together, and one writes.

The wall time of a run is divided between its rows. A row ends when what it
names has ended: a segment when the devices have computed its metrics, however
much later these are read. What was compiled in that time is a row of its own.
"""

import dataclasses
import logging
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dilocox_jax.distributed.coordinator_store import arrays_to_host
from dilocox_jax.distributed.link_counter import LinkCounter
from dilocox_jax.metrics.recorder import Recorder
from dilocox_jax.outer.drift import Drift
from dilocox_jax.plan.schedule.membership import RoundParticipation
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.report.units import human_bytes
from dilocox_jax.rounds.window import StepMetrics
from dilocox_jax.training import evaluation
from dilocox_jax.training.build import Programs
from dilocox_jax.training.states import NotFiniteError, TrainingProgress
from dilocox_jax.training.wall_time import CompileTimes

_LOG_SHARE, _LOG_S = 0.1, 30.0  # Of a run's steps; seconds.


class ProgressLog:
  """Logs a line: after the first update, then now and then.

  That is after every tenth of the run or 30 seconds, whichever comes first.
  """

  def __init__(self, title: str, total_steps: int, begun: TrainingProgress):
    """Logs nothing yet.

    Args:
      title: What is running.
      total_steps: Inner steps of the run.
      begun: How far the run was before.
    """
    self._title, self._total_steps = title, total_steps
    self._begun, self._begun_s = begun, time.monotonic()
    # Nothing was logged yet, so the first update is due.
    self._logged = begun.step, -math.inf

  def leave_out(self, seconds: float) -> None:
    """Lets the time since the last update not count: programs were compiled."""
    self._begun_s += seconds

  def update(self, progress: TrainingProgress, loss: float, note: str) -> None:
    """Says how far the run is, and how long it will take, if a line is due.

    Speed and time left are those of the whole run so far, without what was left
    out. A single segment says little: on a CPU the next one may have run to its
    end before this one is read.

    Args:
      progress: How far the run is.
      loss: Mean loss of the segment.
      note: What else there is to say.
    """
    step, now_s = progress.step, time.monotonic()
    logged_step, logged_s = self._logged
    is_many = step - logged_step >= _LOG_SHARE * self._total_steps
    if not is_many and now_s - logged_s < _LOG_S:
      return
    self._logged, spent_s = (step, now_s), now_s - self._begun_s
    speed = (progress.tokens - self._begun.tokens) / spent_s
    step_s = spent_s / (step - self._begun.step)
    logging.getLogger(__name__).info(
      "%s: step %d of %d | loss %.3f | %s tokens/s | sent %s%s | %.1f min left",
      *(self._title, step, self._total_steps, loss, f"{speed:,.0f}"),
      *(human_bytes(progress.total_sent_bytes), f" | {note}" if note else ""),
      (self._total_steps - step) * step_s / 60,
    )


class LearningRates:
  """Values of a learning rate schedule, on the host.

  A schedule computes on a device. Asked for one step, it would wait until the
  device has done all that was dispatched before, which is the next segment. So
  the rates of many steps are computed at once.
  """

  _STEPS = 65_536  # That many rates take 256 kB.

  def __init__(self, schedule: optax.Schedule):
    """Computes the first rates.

    Args:
      schedule: Function from the inner step to the learning rate.
    """
    self._many = jax.jit(jax.vmap(schedule))
    self._blocks: dict[int, np.ndarray] = {}
    self.at(0)

  def at(self, step: int) -> float:
    """Returns the rate of an inner step.

    Args:
      step: Number of inner steps that came before it.
    """
    number, offset = divmod(step, self._STEPS)
    if number not in self._blocks:
      start = number * self._STEPS
      steps = jnp.arange(start, start + self._STEPS)
      with jax.numpy_dtype_promotion("standard"):
        self._blocks = {number: np.asarray(self._many(steps))}
    return float(self._blocks[number][offset])


@dataclasses.dataclass(frozen=True)
class DispatchedSegment:
  """A segment whose metrics have not been read yet.

  Attributes:
    segment: The segment that runs.
    progress: How far the run is after the segment.
    metrics: Losses and gradient norms [M, H], still on the devices.
    drifts: Drift of every exchange that it applies, still on the devices.
    ready_s: When the devices will have computed these (`wall_time.ready_time`).
    waits: When it waited for its exchanges, pairs of begin and end
      (`time.perf_counter`); None if that is not known.
    note: What else the progress line says.
  """

  segment: Segment
  progress: TrainingProgress
  metrics: StepMetrics
  drifts: Sequence[Drift]
  ready_s: Future[float]
  waits: Sequence[tuple[float, float]] | None = None
  note: str = ""


class MetricsReader:
  """Reads segments in order and divides the time between what was done.

  Attributes:
    reads_at_once: Whether a segment is to be read as soon as it is dispatched.
  """

  def __init__(
    self,
    title: str,
    programs: Programs,
    workdir: pathlib.Path | None,
    progress: TrainingProgress,
    is_resumed: bool = False,
  ):
    """Opens the records and starts to measure time.

    Args:
      title: Name of the run's method, for the log.
      programs: Programs of the run.
      workdir: The run directory; None: another process writes and logs.
      progress: How far the run is before the first segment.
      is_resumed: Whether a checkpoint was restored.
    """
    step_before = progress.step if is_resumed else None
    self._recorder = Recorder(workdir, step_before)
    self._log = None
    if workdir:
      self._log = ProgressLog(title, programs.plan.total_steps, progress)
    self._rates = LearningRates(programs.schedule)
    self._energy_share = programs.policy.energy
    self._compile_times = CompileTimes()
    self._recorded_s = time.perf_counter()
    self._before = progress
    self._link = LinkCounter()
    # A segment whose dispatch waits for exchanges is over then. The bytes of a
    # segment on a link must not mix with those of the next one.
    waits = programs.rounds.runtime.waits_for_exchanges
    self.reads_at_once = waits or bool(self._link.interface)

  def close(self) -> None:
    """Stops measuring."""
    self._compile_times.close()

  def record_time(
    self,
    event: str,
    step: int,
    simulated_s: float | None = None,
    tokens: int = 0,
    waits: Sequence[tuple[float, float]] | None = None,
    ended_s: float | None = None,
  ) -> None:
    """Records the time since the end of the last event under an event.

    What JAX compiled in that time has a row of its own in front.

    Args:
      event: One of those of `recorder.Timing`.
      step: Inner steps finished.
      simulated_s: Simulated seconds, if the run carries a clock.
      tokens: Tokens that all replicas saw in this time.
      waits: When in this time exchanges were waited for, if it is known.
      ended_s: When the event ended (`time.perf_counter`); None: now.
    """
    start_s = self._recorded_s
    if ended_s is None:
      ended_s = time.perf_counter()
    self._recorded_s = max(start_s, ended_s)
    compile_s = self._compile_times.seconds(start_s, self._recorded_s)
    if compile_s > 0:
      self._record_compiling(step, compile_s)
    wall_s = self._recorded_s - start_s - compile_s
    self._recorder.record_timing(
      step=step,
      event=event,
      wall_s=wall_s,
      tokens_per_s=tokens / wall_s if tokens and wall_s > 0 else None,
      simulated_s=simulated_s,
      exposed_s=None if waits is None else self._exposed_s(waits),
      link_bytes=self._link.new_bytes(),
    )

  def _exposed_s(self, waits: Sequence[tuple[float, float]]) -> float:
    """Returns the seconds of waiting in which nothing was compiled."""
    return math.fsum(
      end_s - start_s - self._compile_times.seconds(start_s, end_s)
      for start_s, end_s in waits
    )

  def _record_compiling(self, step: int, compile_s: float) -> None:
    if self._log:
      self._log.leave_out(compile_s)
    self._recorder.record_timing(step=step, event="compile", wall_s=compile_s)

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
    self._recorder.record_evaluation(
      num_steps=num_steps,
      step=progress.step,
      tokens=progress.tokens,
      total_sent_bytes=progress.total_sent_bytes,
      **losses,
    )
    self._before = progress  # What an evaluation sends belongs to no round.

  def check_flush(
    self,
    drifts: Sequence[Drift],
    step: int,
    participation: RoundParticipation | None = None,
  ) -> None:
    """Checks that what every replica sent in the flush is finite.

    Args:
      drifts: Drifts of the exchanges of the flush, on the devices.
      step: Inner steps of the run.
      participation: Who takes part in the flush; None: all replicas alike.

    Raises:
      NotFiniteError: One line that names the replica and the step.
    """
    exchanges = arrays_to_host(drifts)
    evaluation.check_drifts(exchanges, [step] * len(exchanges), participation)

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
    start, participation = (
      done.segment.schedule_start,
      done.segment.participation,
    )
    events = evaluation.applied_events(done.segment)
    sent_steps = [start + event.send_step for event in events]
    evaluation.check_drifts(exchanges, sent_steps, participation)
    (loss, each_loss), (grad_norm, _) = (
      evaluation.step_means(values, participation) for values in step_metrics
    )
    before, progress = self._before, done.progress
    self._before = progress
    self._recorder.record_round(
      step=progress.step,
      tokens=progress.tokens,
      phase=done.segment.phase,
      loss=loss,
      loss_per_replica=each_loss,
      grad_norm=grad_norm,
      learning_rate=self._rates.at(progress.step - 1),
      sent_bytes=progress.total_sent_bytes - before.total_sent_bytes,
      total_sent_bytes=progress.total_sent_bytes,
      drift=evaluation.drift_rows(done.segment, exchanges, self._energy_share),
    )
    self.record_time(
      "round",
      step=progress.step,
      simulated_s=progress.simulated_s,
      tokens=progress.tokens - before.tokens,
      waits=done.waits,
      ended_s=done.ready_s.result(),
    )
    if self._log:
      self._log.update(progress, loss, done.note)
    return exchanges
