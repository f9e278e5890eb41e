"""Walks the plan and calls each station.

Nothing is computed here: segments come from the plan, programs from the
assembly, rows go to the logbook, state to the checkpoints. A segment is
dispatched before the metrics of the one before it are read, so the devices
never wait for the host. Of several processes each walks the whole plan with
the batches of its own replicas.
"""

import dataclasses
import pathlib
import sys
from typing import Any

import jax

from dilocox_jax import report
from dilocox_jax.config import RunConfig
from dilocox_jax.distributed import processes, replica_consistency
from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.round_program import RoundState
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.schedule.window_groups import window_groups
from dilocox_jax.plan.wire.traffic import broadcast_bytes
from dilocox_jax.report.page import PAGE
from dilocox_jax.training import build, evaluation, metrics_reader, start
from dilocox_jax.training.adaptive_controller import AdaptiveController
from dilocox_jax.training.checkpoint import Checkpoints, RefusedError
from dilocox_jax.training.clock import Clock
from dilocox_jax.training.metrics_reader import (
  DispatchedSegment,
  NotFiniteError,
)
from dilocox_jax.training.states import TrainingProgress, TrainingState


class TrainingStoppedError(RuntimeError):
  """The run cannot go on; the message says where and what to change."""


class Trainer:
  """One run in one directory; `run` takes it to its end."""

  def __init__(
    self,
    config: RunConfig,
    workdir: pathlib.Path,
    command: str = "",
    clock: Clock | None = None,
  ):
    """Builds all stations; raises ValueError with one line if it cannot.

    Args:
      config: What to run.
      workdir: The run directory; made if missing, continued if not.
      command: The command line, for the record.
      clock: Says what the run would have cost elsewhere; shown, never asked.
    """
    self.clock = clock
    self.config, self.workdir, self.command = config, workdir, command
    # First: processes that differ would look for each other in vain.
    processes.check_equal(config=config.to_mapping())
    self.programs = build.programs(config)
    self.replicas = self.programs.rounds.replicas
    if processes.num_processes() > 1:
      processes.open_connections(self.replicas.mesh)
    self.corpus = build.corpus(config)
    processes.check_equal(text=self.corpus.digest)
    self.streams = build.streams(config, self.corpus)
    self.controller = AdaptiveController(config, self.programs)
    self.held_out = build.held_out(config, self.corpus)
    self.validation = self.replicas.place(self.held_out, None)
    self.progress = TrainingProgress()
    self._compiled = set()

  def run(self) -> pathlib.Path:
    """Trains to the end and writes the report.

    Returns:
      Path of the report; of several processes only the main one writes it.

    Raises:
      TrainingStoppedError: If a value is not finite.
      RefusedError: If the directory holds a run that means something else.
      LostProcessError: If another process of the run is gone.
    """
    keep = self.config.checkpoint.keep
    self._checkpoints = Checkpoints(self.workdir / "checkpoints", keep)
    try:
      with processes.detect_lost_process():
        self._start_and_walk()
    except NotFiniteError as error:
      raise TrainingStoppedError(
        f"{error}: lower inner.learning_rate="
        f"{self.config.inner.learning_rate} or outer.learning_rate="
        f"{self.config.outer.learning_rate}; the last good checkpoint in "
        f"{self.workdir} is kept"
      ) from error
    finally:
      # A save that needs a lost process would not end.
      if not isinstance(sys.exception(), processes.LostProcessError):
        self._checkpoints.close()
    if not processes.is_main():
      return self.workdir / PAGE
    return report.write_report(self.workdir)

  def _start_and_walk(self) -> None:
    resumed = start.resumed_state(
      self.config, self.programs, self._checkpoints, self.corpus.digest
    )
    if resumed:
      state, record = resumed
      self.progress = TrainingProgress(**record["position"])
      self.streams.set_state(record["streams"])
      self.controller.set_state(record["pilot"])
      self._set_clock(record.get("clock"))
    else:
      phase = self.controller.plan.phase(0)
      state = start.first_state(self.config, self.programs, phase)
    if self.progress.is_finished:
      return
    with metrics_reader.open_reader(
      self.config,
      self.workdir,
      corpus=self.corpus,
      held_out=self.held_out,
      schedule=self.programs.schedule,
      command=self.command,
      step=self.progress.step,
      is_resumed=bool(resumed),
    ) as self._reader:
      self._walk(state)

  def _set_clock(self, saved: dict[str, Any] | None) -> None:
    """The clock goes on, and the run keeps the one it began with."""
    if self.progress.is_finished:
      return
    if (saved is None) != (self.clock is None):
      began = "without" if saved is None else "with"
      raise RefusedError(
        f"the work directory holds a run that began {began} --cluster: go on "
        "likewise, or take another --workdir"
      )
    if self.clock and saved:
      try:
        self.clock.set_state(saved)
      except ValueError as error:
        raise RefusedError(str(error)) from error

  def _walk(self, state: TrainingState) -> None:
    waiting: DispatchedSegment | None = None
    while self.progress.step < self.config.total_steps:
      segment = self.controller.plan.segment(self.progress.step)
      is_new = self._is_new(segment)
      if is_new:  # So that compiling is booked on its own.
        waiting = self._read(waiting)
      state, dispatched = self._dispatch(state, segment)
      if is_new:
        self._reader.record_time("compile", segment.start)
      self._read(waiting)
      waiting = dispatched
      if self._needs_pause(segment):
        waiting = self._read(waiting)
        state = self._pause(state, segment)
    self._read(waiting)
    self._finish(state)

  def _read(self, waiting: DispatchedSegment | None) -> None:
    """Waits for a segment; the pilot hears what was measured in it."""
    if waiting:
      self.controller.observe(self._reader.read(waiting))

  def _is_new(self, segment: Segment) -> bool:
    """Whether no segment of this program has run yet."""
    shapes, _ = window_groups(
      self.controller.plan.method.schedule, segment.windows
    )
    program = (
      segment.phase,
      segment.num_steps,
      shapes,
      self.controller.setting,
    )
    is_new = program not in self._compiled
    self._compiled.add(program)
    return is_new

  def _dispatch(
    self, state: TrainingState, segment: Segment
  ) -> tuple[TrainingState, DispatchedSegment]:
    """Starts a segment; nothing crosses to or from the devices unasked."""
    is_alone = segment.phase == "single"
    batches = self.streams.take(
      segment.num_steps, [0] if is_alone else self.replicas.own
    )
    drifts = []
    with jax.transfer_guard("disallow"):
      if isinstance(state, RoundState):
        state, seen, drifts = self.controller.rounds.round(
          state, batches, segment.windows
        )
      else:
        programs = self.programs.steps_of(segment.phase)
        state, seen = programs.steps(state, batches)
    traffic = self.controller.traffic
    sent_bytes = traffic.segment_bytes(segment)
    if is_alone and segment.ends_phase:
      copied_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
      sent_bytes += broadcast_bytes(copied_bytes, self.config.mesh.num_replicas)
    clock = self.clock
    simulated_s = clock.advance(segment, traffic) if clock else None
    tokens = segment.num_steps * self.config.tokens_per_replica_step
    tokens *= 1 if is_alone else self.config.mesh.num_replicas
    self.progress = TrainingProgress(
      segment.stop,
      self.progress.tokens + tokens,
      self.progress.total_sent_bytes + sent_bytes,
      simulated_s=simulated_s,
    )
    return state, DispatchedSegment(
      segment, self.progress, sent_bytes, tokens, seen, drifts
    )

  def _needs_pause(self, segment: Segment) -> bool:
    """Whether something follows before the next segment (the end apart)."""
    if segment.stop == self.config.total_steps:
      return False
    return (
      segment.ends_phase
      or self.controller.may_become_due(segment)
      or segment.crosses(self.config.evaluation.interval_steps)
      or segment.crosses(self.config.checkpoint.interval_steps)
    )

  def _pause(self, state: TrainingState, segment: Segment) -> TrainingState:
    """Hands over a warm start, steers, evaluates, saves, as is due."""
    if segment.ends_phase:
      assert isinstance(state, SharedState), "only a warm start ends"
      state = self._begin_rounds(state, segment)
    if self.controller.is_choice_due():
      self.controller.choose_setting(segment)
      # A spectrum's last bits differ by machine, and so might a choice.
      self.controller.set_state(
        processes.from_main(self.controller.get_state())
      )
    if segment.crosses(self.config.evaluation.interval_steps):
      self._evaluate(state)
    if segment.crosses(self.config.checkpoint.interval_steps):
      self._save(state, self.controller.plan.phase(segment.stop))
    return state

  def _begin_rounds(self, state: SharedState, segment: Segment) -> RoundState:
    """Every replica starts from the warm start's parameters and state."""
    shared = (state.params, state.optimizer)
    if segment.phase == "single":  # It had the devices of one replica only.
      shared = self.replicas.place(shared, None)
    return self.programs.rounds.init(*shared)

  def _evaluate(
    self, state: TrainingState, num_steps: int | None = None
  ) -> None:
    losses = evaluation.losses(self.programs, state, self.validation)
    self._reader.record_evaluation(losses, self.progress, num_steps)

  def _save(self, state: TrainingState, phase: str) -> None:
    if not evaluation.is_finite(state):
      raise NotFiniteError(
        f"a parameter is not finite after step {self.progress.step}"
      )
    if not replica_consistency.copies_are_equal(state):
      raise TrainingStoppedError(
        f"the replicas' copies of the outer state differ after step "
        f"{self.progress.step}: their devices do not compute alike; the last "
        f"good checkpoint in {self.workdir} is kept"
      )
    record = {
      "position": dataclasses.asdict(self.progress),
      "phase": phase,
      "streams": self.streams.get_state(),
      "pilot": self.controller.get_state(),
      "clock": self.clock.get_state() if self.clock else None,
      "config": self.config.to_mapping(),
      "corpus_digest": self.corpus.digest,
    }
    self._checkpoints.save(self.progress.step, state, record)
    self._reader.record_time("checkpoint", self.progress.step)

  def _finish(self, state: TrainingState) -> None:
    """Flushes, evaluates and saves; the run cannot be continued after."""
    phase = "data_parallel"
    if isinstance(state, RoundState):
      phase = "local"
      step = self.controller.plan.schedule_step(self.config.total_steps)
      state = self.controller.rounds.flush(state, step)
      traffic = self.controller.traffic
      self.progress.total_sent_bytes += traffic.flush_bytes(step)
      if self.clock:
        self.progress.simulated_s = self.clock.finish(
          self.controller.plan, traffic
        )
    self._evaluate(state, self.config.total_steps)
    self.progress.is_finished = True
    self._save(state, phase)
