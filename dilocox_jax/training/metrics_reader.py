"""Reads, checks and records the metrics of a run's segments, such as rounds.

The metrics of a segment may be read after the next segment was dispatched, so
that the devices need not wait for the host. All processes read and check the
metrics, so that they stop together if a value is not finite. Only the main
process writes.
"""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from dilocox_jax.distributed.coordinator_store import arrays_to_host
from dilocox_jax.distributed.link_counter import LinkCounter
from dilocox_jax.metrics.recorder import Recorder
from dilocox_jax.metrics.run_logs import RunLog
from dilocox_jax.outer.drift import Drift
from dilocox_jax.plan.schedule.membership import RoundParticipation
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.rounds.window import StepMetrics
from dilocox_jax.training import evaluation
from dilocox_jax.training.build import Programs
from dilocox_jax.training.progress import progress_display
from dilocox_jax.training.states import NotFiniteError, TrainingProgress
from dilocox_jax.training.wall_time import CompileTimes


class LearningRates:
  """Values of a learning rate schedule, on the host.

  The rates of many steps are computed at once, because a device computes them
  only after all programs that were dispatched to it before.
  """

  _STEPS = 65_536  # Steps of a block. Their rates take 256 kB.

  def __init__(self, schedule: optax.Schedule):
    """Computes the learning rates of the first 65,536 inner steps.

    Args:
      schedule: Function from the inner step to the learning rate.
    """
    self._rates_of_steps = jax.jit(jax.vmap(schedule))
    self._block_number = -1
    self._block = np.zeros(0)
    self.at(0)

  def at(self, step: int) -> float:
    """Returns the learning rate of an inner step, counted from 0."""
    block_number, offset = divmod(step, self._STEPS)
    if block_number != self._block_number:
      start = block_number * self._STEPS
      steps = jnp.arange(start, start + self._STEPS)
      with jax.numpy_dtype_promotion("standard"):
        self._block = np.asarray(self._rates_of_steps(steps))
      self._block_number = block_number
    return float(self._block[offset])


@dataclasses.dataclass(frozen=True)
class DispatchedSegment:
  """A segment of a run, such as a round, whose metrics have not been read yet.

  Attributes:
    segment: The segment, as the plan of the run describes it.
    progress: Progress of the run after the segment.
    metrics: Losses and gradient norms [M, num_steps], still on the devices.
    drifts: For every exchange whose mean the segment applies, norms of the
      replicas' messages (`Drift`); still on the devices.
    ready_s: Future of the time at which the devices have computed metrics and
      drifts, in seconds of `time.perf_counter` (`wall_time.ready_time`).
    waits: Spans (begin, end) in which the segment waited for exchanges, in
      seconds of `time.perf_counter`; None if they are not known.
    note: A text for the progress line; may be "".
  """

  segment: Segment
  progress: TrainingProgress
  metrics: StepMetrics
  drifts: Sequence[Drift]
  ready_s: Future[float]
  waits: Sequence[tuple[float, float]] | None = None
  note: str = ""


class MetricsReader:
  """Reads the metrics of segments in order, and records metrics and wall time.

  Attributes:
    reads_at_once: Whether the caller must read a segment (a part of the run,
      such as a round) as soon as it is dispatched.
  """

  def __init__(
    self,
    title: str,
    programs: Programs,
    workdir: pathlib.Path | None,
    progress: TrainingProgress,
    is_resumed: bool = False,
    log: RunLog | None = None,
    console: Console | None = None,
  ):
    """Opens the records and starts to measure time.

    Args:
      title: Name of the run's method, for the log.
      programs: Programs of the run.
      workdir: The run directory; None means that another process writes and
        logs.
      progress: Progress of the run before the first segment.
      is_resumed: Whether a checkpoint was restored.
      log: An open log that gets every row, too; None: there is no log.
      console: Terminal or notebook of a progress bar; None: progress is logged
        in lines.
    """
    step_before = progress.step if is_resumed else None
    self._recorder = Recorder(workdir, step_before, log)
    self._total_steps = programs.plan.total_steps
    self._display = None
    if workdir:
      self._display = progress_display(
        title, self._total_steps, progress, console
      )
    self._rates = LearningRates(programs.schedule)
    self._energy_share = programs.policy.energy
    self._compile_times = CompileTimes()
    self._recorded_s = time.perf_counter()
    self._last_progress = progress
    self._link = LinkCounter()
    # If a dispatch waits for exchanges, the segment has ended when the dispatch
    # returns. If the bytes on a link are counted, the bytes of one segment must
    # not mix with the bytes of the next segment.
    waits_for_exchanges = programs.rounds.runtime.waits_for_exchanges
    counts_link_bytes = bool(self._link.interface)
    self.reads_at_once = waits_for_exchanges or counts_link_bytes

  def close(self) -> None:
    """Stops measuring, and releases the terminal."""
    self._compile_times.close()
    if self._display:
      self._display.close()

  def compiling(
    self, segment: Segment
  ) -> contextlib.AbstractContextManager[None]:
    """Shows, in a `with` block, that a segment is being compiled."""
    steps = f"steps {segment.start + 1:,} to {segment.stop:,}"
    return self.activity("compiling", f"{steps} of {self._total_steps:,}")

  def activity(
    self, name: str, then: str
  ) -> contextlib.AbstractContextManager[None]:
    """Shows, inside a `with` block, the run's activity and its duration.

    Args:
      name: Name of the activity, e.g. "evaluating".
      then: What comes next, e.g. "step 31 of 600".
    """
    if self._display:
      return self._display.activity(name, then)
    return contextlib.nullcontext()

  def record_time(
    self,
    event: str,
    step: int,
    simulated_s: float | None = None,
    tokens: int = 0,
    waits: Sequence[tuple[float, float]] | None = None,
    ended_s: float | None = None,
  ) -> None:
    """Records how long an event, such as a round, took.

    This is the time since the end of the event that was recorded before.

    If JAX compiled something in this time, the time to compile becomes a row of
    its own before the row of the event, and is not part of the event's time.

    Args:
      event: Name of the event, e.g. "round" (`recorder.Timing.event`).
      step: Finished inner steps.
      simulated_s: Simulated time of the run so far (seconds); None: the run
        simulates no time.
      tokens: Tokens on which this program's replicas were trained in this time.
      waits: Spans (begin, end) in which the run waited for exchanges, in
        seconds of `time.perf_counter`; None: they are not known.
      ended_s: Time at which the event ended, in seconds of `time.perf_counter`;
        None means now.
    """
    start_s = self._recorded_s
    if ended_s is None:
      ended_s = time.perf_counter()
    # An event that ended before the last record was written takes no time.
    self._recorded_s = max(start_s, ended_s)
    compile_s = self._compile_times.seconds(start_s, self._recorded_s)
    if compile_s > 0:
      self._record_compiling(step, compile_s)
    wall_s = self._recorded_s - start_s - compile_s
    tokens_per_s = None
    if tokens and wall_s > 0:
      tokens_per_s = tokens / wall_s
    exposed_s = None
    if waits is not None:
      exposed_s = self._exposed_s(waits)
    self._recorder.record_timing(
      step=step,
      event=event,
      wall_s=wall_s,
      tokens_per_s=tokens_per_s,
      simulated_s=simulated_s,
      exposed_s=exposed_s,
      link_bytes=self._link.new_bytes(),
    )

  def _exposed_s(self, waits: Sequence[tuple[float, float]]) -> float:
    """Returns for how long the run waited for exchanges (seconds).

    The time in which JAX compiled meanwhile does not count.
    """
    return math.fsum(
      end_s - start_s - self._compile_times.seconds(start_s, end_s)
      for start_s, end_s in waits
    )

  def _record_compiling(self, step: int, compile_s: float) -> None:
    """Records a time to compile, and leaves it out of the displayed speed."""
    if self._display:
      self._display.leave_out(compile_s)
    self._recorder.record_timing(step=step, event="compile", wall_s=compile_s)

  def record_evaluation(
    self,
    losses: Mapping[str, float | None],
    progress: TrainingProgress,
    num_steps: int | None = None,
  ) -> None:
    """Checks and records validation losses.

    Args:
      losses: Losses by name, in nats a token (`evaluation.losses`); None for a
        loss that was not computed.
      progress: Progress of the run.
      num_steps: Inner steps of the whole run, if this is its last evaluation;
        None if the run goes on.

    Raises:
      NotFiniteError: If a loss is not finite. Nothing is recorded then.
    """
    computed = [loss for loss in losses.values() if loss is not None]
    if not all(map(math.isfinite, computed)):
      raise NotFiniteError(
        f"the validation loss is not finite at step {progress.step}"
      )
    self.record_time("evaluation", progress.step, progress.simulated_s)
    self._recorder.record_evaluation(
      num_steps=num_steps,
      step=progress.step,
      tokens=progress.tokens,
      total_sent_bytes=progress.total_sent_bytes,
      **losses,
    )
    # The next round counts its bytes from here, without the bytes that the
    # evaluation has sent.
    self._last_progress = progress

  def check_flush(
    self,
    drifts: Sequence[Drift],
    step: int,
    participation: RoundParticipation | None = None,
  ) -> None:
    """Checks that all messages of the flush, the last exchanges, are finite.

    Args:
      drifts: Norms of the replicas' messages, for each exchange of the flush;
        still on the devices.
      step: Number of inner steps of the run.
      participation: Says which replicas take part in the flush; None: all do.

    Raises:
      NotFiniteError: If the message of a replica that takes part is not finite.
    """
    exchanges = arrays_to_host(drifts)
    evaluation.check_drifts(exchanges, [step] * len(exchanges), participation)

  def read(self, dispatched: DispatchedSegment) -> Sequence[Drift]:
    """Waits for a segment, checks its metrics and records them.

    Args:
      dispatched: A segment with its metrics, on the devices.

    Returns:
      For every exchange that the segment applies, norms of the replicas'
      messages (`Drift`), on the host.

    Raises:
      NotFiniteError: If a loss, or the norm of a gradient or of a replica's
        message, is not finite. Nothing of the segment is recorded then.
    """
    metrics, exchanges = arrays_to_host((dispatched.metrics, dispatched.drifts))
    segment = dispatched.segment
    evaluation.check_losses(metrics, segment)
    sent_steps = [
      segment.schedule_start + event.send_step
      for event in evaluation.applied_events(segment)
    ]
    evaluation.check_drifts(exchanges, sent_steps, segment.participation)
    losses, grad_norms = metrics
    loss, replica_losses = evaluation.step_means(losses, segment.participation)
    grad_norm, _ = evaluation.step_means(grad_norms, segment.participation)
    before = self._last_progress
    progress = dispatched.progress
    self._last_progress = progress
    # The learning rate is that of the segment's last step.
    self._recorder.record_round(
      step=progress.step,
      tokens=progress.tokens,
      phase=segment.phase,
      loss=loss,
      loss_per_replica=replica_losses,
      grad_norm=grad_norm,
      learning_rate=self._rates.at(progress.step - 1),
      sent_bytes=progress.total_sent_bytes - before.total_sent_bytes,
      total_sent_bytes=progress.total_sent_bytes,
      drift=evaluation.drift_rows(segment, exchanges, self._energy_share),
    )
    self.record_time(
      "round",
      step=progress.step,
      simulated_s=progress.simulated_s,
      tokens=progress.tokens - before.tokens,
      waits=dispatched.waits,
      ended_s=dispatched.ready_s.result(),
    )
    if self._display:
      self._display.update(progress, loss, dispatched.note)
    return exchanges
