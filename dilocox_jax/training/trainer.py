"""Goes through the plan of a run and calls its parts.

Nothing is computed here: segments come from the plan, programs from `build`,
rows go to the metrics reader, state to the checkpoints. A segment is
dispatched before the metrics of the one before it are read, so devices never
wait for the host. Each process goes through the whole plan with the batches of
its own replicas.
"""

import contextlib
import dataclasses
import logging
import pathlib
import signal
import sys
from collections.abc import Hashable
from typing import NoReturn

import jax

from dilocox_jax import report
from dilocox_jax.config import RunConfig
from dilocox_jax.distributed import coordinator_store, processes
from dilocox_jax.mailbox_protocol.agreement import (
  ReplicaStaleError,
  StoppedError,
)
from dilocox_jax.metrics import work_directory
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.report.page import PAGE
from dilocox_jax.rounds.data_parallel import SharedState
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training import (
  build,
  evaluation,
  resume,
  run_summary,
  run_text,
  start,
  states,
)
from dilocox_jax.training.adaptive_controller import AdaptiveController
from dilocox_jax.training.checkpoint import FOLDER, Checkpoints
from dilocox_jax.training.local_replicas import LocalReplicas
from dilocox_jax.training.mailbox_replica import (
  MailboxAddress,
  MailboxReplica,
  mailbox_config,
)
from dilocox_jax.training.metrics_reader import DispatchedSegment, MetricsReader
from dilocox_jax.training.parts import NO_PARTS, Clock, Parts
from dilocox_jax.training.states import (
  NotFiniteError,
  StopRequestedError,
  TrainingProgress,
  TrainingState,
  TrainingStoppedError,
)
from dilocox_jax.training.wall_time import ready_time


class Trainer:
  """One run in one directory; `run` takes it to its end.

  Attributes:
    has_begun: Whether this program has done anything that its end would lose.
      Until then it reads, restores, and compiles the first segment.
  """

  def __init__(
    self,
    config: RunConfig,
    workdir: pathlib.Path,
    command: str = "",
    clock: Clock | None = None,
    parts: Parts = NO_PARTS,
    address: MailboxAddress | None = None,
  ):
    """Builds all parts of the run.

    Args:
      config: Config of the run.
      workdir: The run directory; made if missing, continued if it holds a run.
      command: The command line, for the record.
      clock: Simulated clock to advance; training never reads it.
      parts: Parts in place of the config's, `start.with_trainable` among them.
      address: Where this program's replica meets the others of the run; None:
        all replicas are in this runtime. Sets exchange.collective=mailbox.

    Raises:
      ValueError: One line, if a part cannot be built.
    """
    assert parts.trainable or not config.lora.rank, "start.with_trainable"
    self._replicas = _replicas_of(config, address, parts)
    self.config = self._replicas.config
    self.clock = clock
    self.parts = parts
    self.workdir = workdir
    self.command = command
    self._values = self.config.to_mapping()
    self.data = run_text.run_data(self.config, parts)
    self.programs = build.programs(
      self.config,
      self._replicas.with_exchange(parts, self.data.digest),
      self.data.end_of_text,
    )
    params, optimizer = states.shapes_of(self.programs)
    self._replicas.attach(
      self.programs.rounds, params, optimizer, self.data.batch
    )
    self.controller = AdaptiveController(self.programs)
    self.progress = TrainingProgress()
    self.has_begun = False
    self._compiled: set[Hashable] = set()
    self._is_compiling = False
    self._stop_signal = 0

  def request_stop(self, stop_signal: int) -> None:
    """Asks the run to save and stop after the segment under way.

    May be called from another thread, and in any of several processes. What
    comes of a store is then waited for no longer than the grace time.

    Args:
      stop_signal: Number of the signal that asks for it.
    """
    self._stop_signal = stop_signal
    self._replicas.request_stop()
    segment = "the segment under way"
    if self._is_compiling:
      segment += ", which is being compiled"
    logging.getLogger(__name__).info(
      "%s: saving after %s; a second signal ends at once",
      signal.Signals(stop_signal).name,
      segment,
    )

  def run(self) -> pathlib.Path:
    """Trains to the end and writes the report.

    Of several processes only the main one locks the directory and writes.

    Returns:
      Path of the report.

    Raises:
      TrainingStoppedError: If a value is not finite, or a store does not answer
        after a request to stop.
      StopRequestedError: If it was asked to stop, in all processes.
      RefusedError: If the directory, or another process, has another run.
      BusyError: If another run is at work in it.
      LostProcessError: If another process of the run is gone.
    """
    self._join_processes()
    if not processes.is_main():
      self._run()
      return self.workdir / PAGE
    with work_directory.held(self.workdir):
      self._run()
      return report.write_report(self.workdir)

  def _join_processes(self) -> None:
    """Connects processes; those of two runs would wait for ever."""
    try:
      processes.check_equal(config=self._values, text=self.data.digest)
    except ValueError as error:
      raise work_directory.RefusedError(str(error)) from error
    if jax.process_count() > 1:
      processes.open_connections(self.programs.rounds.replicas.mesh)

  def _run(self) -> None:
    """Trains to the end, and says what to do if that cannot be."""
    with processes.detect_lost_process():
      resume.check_nothing_is_lost(self._values, self.workdir, self.data.digest)
      self._checkpoints = Checkpoints(
        self.workdir / FOLDER, self.config.checkpoint.keep
      )
    try:
      with processes.detect_lost_process():
        self._start_and_train()
    except StoppedError as error:
      raise TrainingStoppedError(f"{error}; {self._kept()}") from error
    except NotFiniteError as error:
      raise TrainingStoppedError(
        f"{error}: lower {self._rate('inner')} or {self._rate('outer')}; "
        f"{self._kept()}, and a run with another rate needs another directory"
      ) from error
    finally:
      # A save that needs a lost process would not end.
      if not isinstance(sys.exception(), processes.LostProcessError):
        self._checkpoints.close()

  def _rate(self, section: str) -> str:
    """Names the learning rate of the inner or outer optimizer, for messages."""
    if getattr(self.parts, f"{section}_optimizer") is not None:
      return f"the rate of the {section} optimizer that was handed in"
    rate = getattr(self.config, section).learning_rate
    return f"{section}.learning_rate={rate}"

  def _kept(self) -> str:
    return f"{self._checkpoints.what_is_kept()} in {self.workdir}"

  def _start_and_train(self) -> None:
    self._replicas.enter(self._values, self.parts.names)
    resumed = resume.resumed_state(
      self._values,
      self.programs,
      self._checkpoints,
      self.data.digest,
      self.parts,
    )
    if resumed:
      state, record = resumed
      self.progress = TrainingProgress(**record["position"])
      if self.progress.is_finished:
        self.has_begun = True  # Only the report is left, which is not saved.
        logging.getLogger(__name__).info(
          "the run in %s has ended before: nothing is left to train",
          self.workdir,
        )
        return
      self.data.streams.set_state(record["streams"])
      self.controller.set_state(record["controller"])
      resume.set_clock(self.clock, record.get("clock"))
      self._replicas.set_state(record["mailbox"])
    else:
      state = self._first_state()
    if processes.is_main():
      self._announce(is_resumed=bool(resumed))
    self._replicas.open(self.workdir, self.progress.step if resumed else None)
    self._reader = MetricsReader(
      self.config.sync.method,
      self.programs,
      self.workdir if processes.is_main() else None,
      self.progress,
      bool(resumed),
    )
    with contextlib.closing(self._reader):
      self._train_to_the_end(state)

  def _announce(self, *, is_resumed: bool) -> None:
    """Says on the terminal, and records, what the run is."""
    run_summary.announce(
      self.config,
      self.data,
      self.parts,
      self.controller.plan,
      self.controller.traffic,
      self.progress.step,
    )
    run_summary.record(
      self.config,
      self.data,
      self.parts,
      self.clock,
      self.workdir,
      self.programs,
      self.command,
      is_resumed,
    )

  def _train_to_the_end(self, state: TrainingState) -> None:
    """Trains and finishes; a replica that has lost the others begins again."""
    while not self.progress.is_finished:
      try:
        state = self._train(state)
        self._finish(state)
      except ReplicaStaleError as lost:
        logging.getLogger(__name__).warning("beginning again: %s", lost)
        state = self._first_state()
        self._reader.record_time("catch_up", self.progress.step)

  def _first_state(self) -> TrainingState:
    """Returns the state with which this run, or this replica of it, begins."""
    phase = self.controller.plan.phase(0)
    state = start.first_state(self.config, self.programs, phase, self.parts)
    if not isinstance(state, RoundState):
      return state
    joined = self._replicas.join(state, self.config.total_steps)
    if joined is None:
      return state
    self._go_to(int(jax.device_get(joined.step)))
    return joined

  def _go_to(self, step: int) -> None:
    """Goes to a step of the plan that this replica has not trained up to."""
    self.progress = self.progress.after(step=step)
    self.data.streams.set_state(self.data.streams.get_state() | {"step": step})

  def _train(self, state: TrainingState) -> TrainingState:
    """Goes through all segments that are left."""
    unread: DispatchedSegment | None = None
    while self.progress.step < self.config.total_steps:
      segment = self.controller.plan.segment(self.progress.step)
      if self._replicas.is_behind:
        assert isinstance(state, RoundState)
        state = self._replicas.skip_segment(state, segment)
        self._go_to(segment.stop)
        self._reader.record_time("catch_up", self.progress.step)
        if self._agreed_stop_signal():
          break
        continue
      self._is_compiling = self._is_new(segment)
      if self._is_compiling:
        # Nothing runs while its programs are compiled. So the time to compile
        # is not also that of the segment before.
        unread = self._read(unread)
      state, dispatched = self._dispatch(state, segment)
      self._is_compiling = False
      self.has_begun = True
      self._read(unread)
      unread = dispatched
      if self._reader.reads_at_once:
        unread = self._read(unread)
      if segment.stop == self.config.total_steps:
        break  # What follows is the same for a run that goes on from here.
      stop_signal = self._agreed_stop_signal()
      if stop_signal or self._needs_pause(segment):
        unread = self._read(unread)
        state = self._pause(state, segment, stop_signal)
    self._read(unread)
    if stop_signal := self._agreed_stop_signal():
      self._save_and_stop(state, stop_signal)
    return state

  def _agreed_stop_signal(self) -> int:
    """Returns the signal that asks any process to stop; 0 if none does.

    All processes must stop at one boundary, so they tell each other after
    every segment, by the coordinator's store; the devices send nothing.
    """
    return max(coordinator_store.allgather(self._stop_signal))

  def _read(self, unread: DispatchedSegment | None) -> None:
    """Waits for a segment; the controller learns what was measured in it."""
    if unread:
      self.controller.observe(self._reader.read(unread))

  def _program(self, segment: Segment) -> Hashable:
    """Returns what decides which programs a segment runs."""
    kinds = tuple(map(self.controller.rounds.kind, segment.windows))
    return segment.phase, segment.num_steps, kinds, self.controller.setting

  def _is_new(self, segment: Segment) -> bool:
    """Whether no segment with these programs has run yet."""
    return self._program(segment) not in self._compiled

  def _dispatch(
    self, state: TrainingState, segment: Segment
  ) -> tuple[TrainingState, DispatchedSegment]:
    """Starts a segment; no array crosses to or from the devices by accident."""
    batches = self.data.streams.take(segment.num_steps, self._replicas.indices)
    drifts = []
    with jax.transfer_guard("disallow"):
      if isinstance(state, RoundState):
        state, step_metrics, drifts = self.controller.rounds.run(
          state,
          batches,
          segment.windows,
          segment.participation,
          one_at_a_time=self._is_new(segment),
        )
      else:
        state, step_metrics = self.programs.steps.steps(state, batches)
    self._compiled.add(self._program(segment))
    clock = self.clock
    traffic = self.controller.traffic
    sent_bytes = states.segment_sent_bytes(traffic, segment, state)
    steps = segment.replica_steps(self.config.num_local_replicas)
    self.progress = self.progress.after(
      sent_bytes,
      step=segment.stop,
      tokens=self.progress.tokens + steps * self.data.step_tokens,
      simulated_s=clock.advance(segment, traffic) if clock else None,
    )
    note = self._replicas.record(segment.stop)
    return state, DispatchedSegment(
      segment=segment,
      progress=self.progress,
      metrics=step_metrics,
      drifts=drifts,
      ready_s=ready_time((step_metrics, drifts)),
      waits=self.controller.rounds.runtime.new_waits(),
      note=note,
    )

  def _needs_pause(self, segment: Segment) -> bool:
    """Whether anything follows before the next segment."""
    config = self.config
    is_due = segment.ends_phase or self.controller.is_choice_due(segment)
    intervals = config.evaluation, config.checkpoint
    return is_due or any(segment.crosses(i.interval_steps) for i in intervals)

  def _pause(
    self, state: TrainingState, segment: Segment, stop_signal: int
  ) -> TrainingState:
    """Ends a warm start, chooses a setting, evaluates and saves, as is due.

    Args:
      state: State after the segment, whose rows are all written.
      segment: The segment that has ended.
      stop_signal: Signal that asks the run to stop; 0 if none does.

    Returns:
      The state of the next segment's phase.
    """
    if segment.ends_phase:
      assert isinstance(state, SharedState), "only a warm start ends"
      state = self.programs.rounds.init(state.params, state.optimizer)
    if self.controller.is_choice_due():
      state = self.controller.with_choice(state, segment)
    if segment.crosses(self.config.evaluation.interval_steps):
      self._evaluate(state)
    if stop_signal:
      self._save_and_stop(state, stop_signal)
    if segment.crosses(self.config.checkpoint.interval_steps):
      self._save(state)
    return state

  def _save_and_stop(self, state: TrainingState, stop_signal: int) -> NoReturn:
    """Saves at a boundary of segments, as was asked for, and ends the run."""
    self._save(state)
    self._checkpoints.wait()
    done = f"step {self.progress.step} of {self.config.total_steps}"
    raise StopRequestedError(f"{done} in {self.workdir}", stop_signal)

  def _evaluate(
    self, state: TrainingState, num_steps: int | None = None
  ) -> None:
    judging = self.data.judging if num_steps else None
    given = self.programs, state, self.data.validation, judging
    losses, sent_bytes = evaluation.losses(*given)
    self.progress = self.progress.after(sent_bytes)
    self._reader.record_evaluation(losses, self.progress, num_steps)

  def _save(self, state: TrainingState) -> None:
    if not states.is_finite(state):
      raise NotFiniteError(
        f"a parameter is not finite after step {self.progress.step}"
      )
    if not states.copies_are_equal(state):
      raise TrainingStoppedError(
        f"the replicas' copies of the outer state differ after step "
        f"{self.progress.step}: their devices do not compute alike; "
        f"{self._kept()}"
      )
    record = {
      "position": dataclasses.asdict(self.progress),
      "phase": self.controller.plan.phase(self.progress.step),
      "streams": self.data.streams.get_state(),
      "controller": self.controller.get_state(),
      "clock": self.clock.get_state() if self.clock else None,
      "in_flight": states.num_in_flight(state),
      "config": self._values,
      "corpus_digest": self.data.digest,
      "handed_in": self.parts.names,
      "mailbox": self._replicas.get_state(),
    }
    number = self.progress.step + self.progress.is_finished
    self._checkpoints.save(number, state, record)
    self._reader.record_time("checkpoint", self.progress.step)

  def _finish(self, state: TrainingState) -> None:
    """Flushes, evaluates and saves; the run cannot be continued after."""
    if isinstance(state, RoundState):
      plan, traffic = self.controller.plan, self.controller.traffic
      self._replicas.end()
      step = plan.schedule_step(self.config.total_steps)
      participation = plan.flush_participation()
      state, drifts = self.controller.rounds.flush(state, participation)
      self._replicas.record(self.config.total_steps)
      self._reader.check_flush(drifts, self.config.total_steps, participation)
      jax.block_until_ready(state)
      sent_bytes = traffic.flush_bytes(step, participation)
      end_s = self.clock.finish(plan, traffic) if self.clock else None
      self.progress = self.progress.after(sent_bytes, simulated_s=end_s)
      self._reader.record_time("flush", self.config.total_steps)
    self._evaluate(state, self.config.total_steps)
    self.progress = self.progress.after(is_finished=True)
    self._save(state)


def _replicas_of(
  config: RunConfig, address: MailboxAddress | None, parts: Parts
) -> LocalReplicas | MailboxReplica:
  """Returns the replicas of this program.

  Args:
    config: Config of the run.
    address: Where its replica meets the others; None: all are here.
    parts: Parts that are handed in.

  Raises:
    ValueError: If these do not go together.
  """
  if address is None and not config.uses_mailbox:
    return LocalReplicas(config)
  config = mailbox_config(config, address, parts)
  assert address is not None, "mailbox_config refuses it"
  return MailboxReplica(config, address)
