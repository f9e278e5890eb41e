"""Trains a run in segments, which are parts of the run such as rounds.

The plan of a run says what its segments are. The trainer dispatches a segment
to the devices as a whole. Where this is possible, it dispatches the next one
before it reads the metrics of the last one, so that the devices do not wait for
the host.

If there are several processes, each goes through the whole plan with the
batches of its own replicas.
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
from dilocox_jax.metrics import run_logs, work_directory
from dilocox_jax.metrics.run_logs import LogStart
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
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.training.run_clock import Clock
from dilocox_jax.training.states import (
  NotFiniteError,
  StopRequestedError,
  TrainingProgress,
  TrainingState,
  TrainingStoppedError,
)
from dilocox_jax.training.wall_time import ready_time
from dilocox_jax.training.watching import NOT_WATCHED, FinishedRound, Watching


class Trainer:
  """One run in one directory. The method `run` trains it to the end.

  With a mailbox, the directory has a single replica of the run.

  Attributes:
    has_begun: Whether this program has dispatched a first segment, or has found
      that an earlier program has finished the run. Before that, nothing is lost
      if the program is stopped.
  """

  def __init__(
    self,
    config: RunConfig,
    workdir: pathlib.Path,
    command: str = "",
    clock: Clock | None = None,
    overrides: Overrides = NO_OVERRIDES,
    address: MailboxAddress | None = None,
    watching: Watching = NOT_WATCHED,
  ):
    """Builds all parts of the run.

    Args:
      config: Config of the run.
      workdir: The run directory. If it is missing, the method `run` creates it.
        If it holds this run, `run` continues it.
      command: The command line, for the record.
      clock: Simulated clock to advance; None: no times are simulated.
      overrides: Objects in place of those that the config names. If only a part
        of the model is trained, `start.with_trainable` must have added it.
      address: Mailbox of the run, and name of the only replica that this
        program trains. The trainer then sets exchange.collective=mailbox. None:
        the run has no mailbox, and its processes train all replicas.
      watching: Logs, functions and displays that observe the run.

    Raises:
      ValueError: If a part of the run cannot be built, e.g. its data or its
        model, or if config and address do not go together.
    """
    assert overrides.trainable or not config.lora.rank, "start.with_trainable"
    self._replicas = _replicas_of(config, address, overrides)
    self.config = self._replicas.config
    self.clock = clock
    self.overrides = overrides
    self.workdir = workdir
    self.command = command
    self._watching = watching
    self._values = self.config.to_mapping()
    self.data = run_text.run_data(self.config, overrides)
    self.programs = build.programs(
      self.config,
      self._replicas.with_exchange(overrides, self.data.digest),
      self.data.end_of_text,
    )
    params, optimizer = states.shapes_of(self.programs)
    self._replicas.attach(
      self.programs.rounds,
      traffic=self.programs.traffic,
      params=params,
      optimizer=optimizer,
      batch=self.data.batch,
    )
    self.controller = AdaptiveController(self.programs)
    self.progress = TrainingProgress()
    self.has_begun = False
    self._compiled: set[Hashable] = set()
    self._is_compiling = False
    self._stop_signal = 0

  def request_stop(self, stop_signal: int) -> None:
    """Asks the run to save and stop after the current segment, e.g. a round.

    Any thread may call this method. If one process is asked, all stop. A
    replica with a mailbox may be waiting for its store. If the wait then lasts
    longer than `mailbox.grace_s` seconds plus the seconds that the last
    exchange took, `run` raises TrainingStoppedError without a save.
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

    Only the main process locks the directory and writes the report.

    Returns:
      Path of the report.

    Raises:
      TrainingStoppedError: If a value is not finite, if the replicas' copies of
        the outer state differ, or if a replica with a mailbox cannot continue,
        e.g. because `mailbox.store_bytes` is too low.
      StopRequestedError: If any process was asked to stop.
      RefusedError: If the directory, process 0 or the mailbox has another run,
        if all checkpoints of the directory are damaged, or if the run cannot
        start from `checkpoint.init_from`.
      SaveError: If the disk refuses to store a checkpoint.
      RecordError: If another file of the run cannot be written.
      TokenError: If a batch has a token that is not in the vocabulary.
      BusyError: If another program is training in the directory.
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
    """Connects the processes of the run.

    Raises RefusedError, in every process, if a process has another run or
    mailbox than process 0.
    """
    try:
      processes.check_equal(config=self._values, text=self.data.digest)
    except ValueError as error:
      raise work_directory.RefusedError(str(error)) from error
    self._replicas.check_processes()
    if jax.process_count() > 1:
      processes.open_connections(self.programs.rounds.replicas.mesh)

  def _run(self) -> None:
    """Opens the checkpoints, and trains to the end.

    It raises the errors of `run`, except for `BusyError`.
    """
    with processes.detect_lost_process():
      resume.check_nothing_is_lost(self._values, self.workdir, self.data.digest)
      self._checkpoints = Checkpoints(
        self.workdir / FOLDER, self.config.checkpoint.keep
      )
    try:
      with processes.detect_lost_process():
        self._start_and_train()
    except StoppedError as error:
      raise TrainingStoppedError(
        f"{error}; {self._kept_checkpoint()}"
      ) from error
    except NotFiniteError as error:
      raise TrainingStoppedError(
        f"{error}: lower {self._rate('inner')} or {self._rate('outer')}; "
        f"{self._kept_checkpoint()}, and a run with another rate needs another "
        "directory"
      ) from error
    finally:
      # If a process is lost, a save that needs this process would never end.
      if not isinstance(sys.exception(), processes.LostProcessError):
        self._checkpoints.close()

  def _rate(self, section: str) -> str:
    """Names the learning rate of an optimizer: "inner.learning_rate=0.001".

    Args:
      section: "inner" or "outer".
    """
    if getattr(self.overrides, f"{section}_optimizer") is not None:
      return f"the rate of the {section} optimizer that was passed in"
    rate = getattr(self.config, section).learning_rate
    return f"{section}.learning_rate={rate}"

  def _kept_checkpoint(self) -> str:
    """Names the newest checkpoint and its directory, for messages."""
    return f"{self._checkpoints.what_is_kept()} in {self.workdir}"

  def _start_and_train(self) -> None:
    """Trains to the end, from the newest undamaged checkpoint or step 0."""
    self._replicas.enter(self._values, self.overrides.names)
    resumed = resume.resumed_state(
      values=self._values,
      programs=self.programs,
      checkpoints=self._checkpoints,
      corpus_digest=self.data.digest,
      overrides=self.overrides,
    )
    if resumed:
      state, record = resumed
      self.progress = TrainingProgress(**record["position"])
      if self.progress.is_finished:
        self.has_begun = True  # Only the report is left to write.
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
    is_resumed = resumed is not None
    if processes.is_main():
      self._announce(is_resumed=is_resumed)
    resume_step = self.progress.step if is_resumed else None
    # Only the main process writes metrics.
    metrics_directory = self.workdir if processes.is_main() else None
    log = self._watching.log if processes.is_main() else None
    log_start = LogStart(
      workdir=self.workdir, config=self._values, resume_step=resume_step
    )
    with run_logs.opened(log, log_start):
      self._replicas.open(self.workdir, resume_step, log)
      self._reader = MetricsReader(
        title=self.config.sync.method,
        programs=self.programs,
        workdir=metrics_directory,
        progress=self.progress,
        is_resumed=is_resumed,
        log=log,
        console=self._watching.console,
      )
      with contextlib.closing(self._reader):
        self._train_to_the_end(state)

  def _announce(self, *, is_resumed: bool) -> None:
    """Logs model, data and method, and writes `config.json` and `run.json`."""
    run_summary.announce(
      config=self.config,
      data=self.data,
      overrides=self.overrides,
      plan=self.controller.plan,
      traffic=self.controller.traffic,
      step=self.progress.step,
    )
    run_summary.record(
      config=self.config,
      data=self.data,
      overrides=self.overrides,
      clock=self.clock,
      workdir=self.workdir,
      programs=self.programs,
      command=self.command,
      is_resumed=is_resumed,
    )

  def _train_to_the_end(self, state: TrainingState) -> None:
    """Trains to the end, and evaluates and saves the result.

    If this replica can no longer follow the other replicas of its mailbox, it
    joins the run again, as a late replica does (`_first_state`).
    """
    while not self.progress.is_finished:
      try:
        state = self._train(state)
        self._finish(state)
      except ReplicaStaleError as error:
        logging.getLogger(__name__).warning("beginning again: %s", error)
        state = self._first_state()
        self._reader.record_time("catch_up", self.progress.step)

  def _first_state(self) -> TrainingState:
    """Returns the state with which this program starts to train.

    A replica that joins a mailbox late starts with the state of the other
    replicas. Progress and data streams are moved to the step of this state.
    """
    phase = self.controller.plan.phase(0)
    state = start.first_state(self.config, self.programs, phase, self.overrides)
    if not isinstance(state, RoundState):
      return state
    joined_state = self._replicas.join(state, self.config.total_steps)
    if joined_state is None:
      return state
    self._skip_to(int(jax.device_get(joined_state.step)))
    return joined_state

  def _skip_to(self, step: int) -> None:
    """Moves progress and data streams to a step, without training."""
    self.progress = self.progress.after(step=step)
    self.data.streams.set_state(self.data.streams.get_state() | {"step": step})

  def _train(self, state: TrainingState) -> TrainingState:
    """Trains all segments that are left, and returns the state after them.

    Raises `StopRequestedError` after a save if the run was asked to stop.
    """
    pending: DispatchedSegment | None = None  # Its metrics are not yet read.
    while self.progress.step < self.config.total_steps:
      segment = self.controller.plan.segment(self.progress.step)
      if self._replicas.is_behind:
        # The other replicas have gone on. This replica applies their results
        # and skips its own inner steps until it has caught up.
        assert isinstance(state, RoundState)
        state = self._replicas.skip_segment(state, segment)
        self._skip_to(segment.stop)
        self._reader.record_time("catch_up", self.progress.step)
        if self._agreed_stop_signal():
          break  # The state is saved below.
        continue
      self._is_compiling = self._is_new(segment)
      if self._is_compiling:
        # The segment before has ended when the programs of this one are
        # compiled. So its time does not include the time to compile.
        self._read(pending)
        pending = None
        with self._reader.compiling(segment):
          state, dispatched = self._dispatch(state, segment)
      else:
        state, dispatched = self._dispatch(state, segment)
      self._is_compiling = False
      self.has_begun = True
      self._read(pending)
      pending = dispatched
      if self._reader.reads_at_once:
        self._read(pending)
        pending = None
      self._call_on_round(state)
      if segment.stop == self.config.total_steps:
        # A run that continues from a checkpoint of the last step does not pause
        # here either.
        break
      stop_signal = self._agreed_stop_signal()
      if stop_signal or self._needs_pause(segment):
        self._read(pending)
        pending = None
        state = self._pause(state, segment, stop_signal)
    self._read(pending)
    stop_signal = self._agreed_stop_signal()
    if stop_signal:
      self._save_and_stop(state, stop_signal)
    return state

  def _agreed_stop_signal(self) -> int:
    """Returns the highest stop signal of all processes; 0 if none has one."""
    # All processes must stop after the same segment, so they tell each other.
    return max(coordinator_store.allgather(self._stop_signal))

  def _read(self, pending: DispatchedSegment | None) -> None:
    """Waits for a segment, if there is one, and records its metrics."""
    if pending is not None:
      self.controller.observe(self._reader.read(pending))

  def _call_on_round(self, state: TrainingState) -> None:
    """Calls the user's function `on_round`, if any, after a dispatch."""
    if self._watching.on_round:
      finished_round = FinishedRound(
        step=self.progress.step,
        total_steps=self.config.total_steps,
        state=state,
        _programs=self.programs,
      )
      self._watching.on_round(finished_round)

  def _program_key(self, segment: Segment) -> Hashable:
    """Returns a key that is equal for segments that run the same programs."""
    window_kinds = tuple(
      self.controller.rounds.kind(window) for window in segment.windows
    )
    setting = self.controller.setting
    return (segment.phase, segment.num_steps, window_kinds, setting)

  def _is_new(self, segment: Segment) -> bool:
    """Whether a segment needs programs that no earlier segment has run."""
    return self._program_key(segment) not in self._compiled

  def _dispatch(
    self, state: TrainingState, segment: Segment
  ) -> tuple[TrainingState, DispatchedSegment]:
    """Dispatches a segment, and moves the progress and the clock on.

    Returns the state after the segment, and the segment with its metrics.
    """
    batches = self.data.streams.take(segment.num_steps, self._replicas.indices)
    drifts = []  # For each applied mean, how far the replicas were apart.
    # No array may move between host and devices by accident.
    with jax.transfer_guard("disallow"):
      if isinstance(state, RoundState):
        state, step_metrics, drifts = self.controller.rounds.run(
          state,
          batches,
          segment.windows,
          segment.participation,
          # So that compiling is not counted as time of the rounds.
          one_at_a_time=self._is_new(segment),
        )
      else:
        state, step_metrics = self.programs.steps.steps(state, batches)
    self._compiled.add(self._program_key(segment))
    traffic = self.controller.traffic
    simulated_s = None
    if self.clock:
      simulated_s = self.clock.advance(segment, traffic)
    replica_steps = segment.replica_steps(self.config.num_local_replicas)
    self.progress = self.progress.after(
      sent_bytes=states.segment_sent_bytes(traffic, segment, state),
      step=segment.stop,
      tokens=self.progress.tokens + replica_steps * self.data.step_tokens,
      simulated_s=simulated_s,
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
    """Whether `_pause` has anything to do after a segment."""
    if segment.ends_phase:
      return True
    if self.controller.is_choice_due(segment):
      return True
    if segment.crosses(self.config.evaluation.interval_steps):
      return True
    return segment.crosses(self.config.checkpoint.interval_steps)

  def _pause(
    self, state: TrainingState, segment: Segment, stop_signal: int
  ) -> TrainingState:
    """Does everything that is due between two segments.

    In this order: end a warm start (data-parallel steps before the first
    round), choose a new rank of the codec and a new H (steps of a round),
    evaluate, save. With a `stop_signal` above 0, the state is saved in any
    case, and `StopRequestedError` is raised.
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
    """Saves a state between two segments and raises `StopRequestedError`."""
    self._save(state)
    self._checkpoints.wait()
    step = f"step {self.progress.step} of {self.config.total_steps}"
    raise StopRequestedError(f"{step} in {self.workdir}", stop_signal)

  def _evaluate(
    self, state: TrainingState, num_steps: int | None = None
  ) -> None:
    """Computes and records the validation losses of a state.

    The last evaluation of a run also computes the loss on the judge text, if
    there is one: held-out files that no other evaluation reads.

    Args:
      state: State to evaluate.
      num_steps: Inner steps of the run, if this is its last evaluation; None if
        the run goes on.
    """
    judging = self.data.judging if num_steps else None
    with self._reader.activity("evaluating", self._next_steps()):
      losses, sent_bytes = evaluation.losses(
        self.programs, state, self.data.validation, judging=judging
      )
    self.progress = self.progress.after(sent_bytes)
    self._reader.record_evaluation(losses, self.progress, num_steps)

  def _next_steps(self) -> str:
    """Names what comes after an evaluation, for the display of the progress."""
    if self.progress.step == self.config.total_steps:
      return "the last checkpoint"
    return f"step {self.progress.step + 1:,} of {self.config.total_steps:,}"

  def _save(self, state: TrainingState) -> None:
    """Checks a state, and starts to save it in the background.

    Raises NotFiniteError if a value is not finite, and TrainingStoppedError if
    replicas have different copies of the outer state.
    """
    if not states.is_finite(state):
      raise NotFiniteError(
        f"a parameter is not finite after step {self.progress.step}"
      )
    if not states.copies_are_equal(state):
      raise TrainingStoppedError(
        f"the replicas' copies of the outer state differ after step "
        f"{self.progress.step}: their devices do not compute alike; "
        f"{self._kept_checkpoint()}"
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
      "overrides": self.overrides.names,
      "mailbox": self._replicas.get_state(),
    }
    checkpoint_number = self.progress.step
    if self.progress.is_finished:
      # This step may have a checkpoint already, from before the flush.
      checkpoint_number += 1
    self._checkpoints.save(checkpoint_number, state, record)
    self._reader.record_time("checkpoint", self.progress.step)

  def _finish(self, state: TrainingState) -> None:
    """Ends a run after its last step: last exchanges, evaluation and save."""
    if isinstance(state, RoundState):
      state = self._flush(state)
    self._evaluate(state, self.config.total_steps)
    self.progress = self.progress.after(is_finished=True)
    self._save(state)

  def _flush(self, state: RoundState) -> RoundState:
    """Averages and applies all progress that is not in the outer state yet.

    Returns the state after these exchanges, and records their bytes and time.
    """
    plan = self.controller.plan
    traffic = self.controller.traffic
    total_steps = self.config.total_steps
    self._replicas.end()
    participation = plan.flush_participation()
    with self._reader.activity("flushing", "the last evaluation"):
      state, drifts = self.controller.rounds.flush(state, participation)
      self._replicas.record(total_steps)
      self._reader.check_flush(drifts, total_steps, participation)
      jax.block_until_ready(state)
    simulated_s = None
    if self.clock:
      simulated_s = self.clock.finish(plan, traffic)
    self.progress = self.progress.after(
      sent_bytes=traffic.flush_bytes(
        plan.schedule_step(total_steps), participation
      ),
      simulated_s=simulated_s,
    )
    self._reader.record_time("flush", total_steps)
    return state


def _replicas_of(
  config: RunConfig, address: MailboxAddress | None, overrides: Overrides
) -> LocalReplicas | MailboxReplica:
  """Returns the object that stands for the replicas of this program.

  Raises ValueError if config, address and overrides do not go together.
  """
  if address is None and not config.uses_mailbox:
    return LocalReplicas(config)
  config = mailbox_config(config, address, overrides)
  assert address is not None, "mailbox_config refuses it"
  return MailboxReplica(config, address)
