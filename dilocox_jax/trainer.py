"""Walks the plan and calls each station.

Nothing is computed here: segments come from the plan, programs from the
assembly, rows go to the recorder, state to the checkpoints. A segment is
dispatched before the metrics of the one before it are read, so the devices
never wait for the host.
"""

import dataclasses
import logging
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np

from dilocox_jax import (
  assembly,
  evaluation,
  inherit,
  metrics,
  report,
  states,
)
from dilocox_jax.checkpoint import Checkpoints, RefusedError
from dilocox_jax.config import FREE_ON_RESUME, RunConfig
from dilocox_jax.mapping import changed_fields
from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.round import RoundState, StepMetrics
from dilocox_jax.plan import shapes
from dilocox_jax.plan.segments import Segment
from dilocox_jax.plan.traffic import broadcast_bytes
from dilocox_jax.progress import Progress
from dilocox_jax.pytypes import Tree
from dilocox_jax.states import State


class TrainingStoppedError(RuntimeError):
  """The run cannot go on; the message says where and what to change."""


@dataclasses.dataclass
class Position:
  """How far a run is; all of it is in every checkpoint's record."""

  step: int = 0
  tokens: int = 0
  total_sent_bytes: int = 0
  is_finished: bool = False


@dataclasses.dataclass(frozen=True)
class Dispatched:
  """A segment whose metrics have not been read yet."""

  segment: Segment
  position: Position
  sent_bytes: int
  metrics: Any  # StepMetrics of [M, H] arrays, still on the device.
  drifts: Any
  since: float  # time.perf_counter() when the devices could start.


class Trainer:
  """One run in one directory; `run` takes it to its end."""

  def __init__(
    self, config: RunConfig, workdir: pathlib.Path, command: str = ""
  ):
    """Builds all stations; raises ValueError with one line if it cannot.

    Args:
      config: What to run.
      workdir: The run directory; made if missing, continued if not.
      command: The command line, for the record.
    """
    self.config, self.workdir, self.command = config, workdir, command
    self.plan = assembly.run_plan(config)
    self.traffic = assembly.traffic(config)
    self.corpus = assembly.corpus(config)
    self.streams = assembly.streams(config, self.corpus)
    self.programs = assembly.programs(config)
    self.validation = jax.device_put(assembly.held_out(config, self.corpus))
    self.position = Position()
    self._last_read = 0.0

  def run(self) -> pathlib.Path:
    """Trains to the end and writes the report.

    Returns:
      Path of the report.

    Raises:
      TrainingStoppedError: If a value is not finite.
    """
    checkpoints = Checkpoints(
      self.workdir / "checkpoints", self.config.checkpoint.keep
    )
    try:
      restored = checkpoints.restore(self._template)
      state = self._resume(*restored) if restored else self._first_state()
      if not self.position.is_finished:
        self._record_run()
        step = self.position.step if restored else None
        with metrics.Recorder(self.workdir, step) as recorder:
          self._walk(state, recorder, checkpoints)
    finally:
      checkpoints.close()
    return report.write_report(self.workdir)

  def _first_state(self) -> State:
    phase, source = self.plan.phase(0), self.config.checkpoint.init_from
    if source:
      return inherit.inherited_state(
        self.config, self.programs, phase, pathlib.Path(source)
      )
    params = jax.jit(self.programs.model.init)(jax.random.key(self.config.seed))
    return states.fresh(self.programs, phase, params)

  def _template(self, record: dict[str, Any]) -> State:
    """Arrays like a checkpoint's, once its run is known to be this one."""
    changed = changed_fields(
      record["config"], self.config.to_mapping(), FREE_ON_RESUME
    )
    if record["corpus_digest"] != self.corpus.digest:
      changed.append(
        f"corpus digest: {record['corpus_digest']} -> {self.corpus.digest}"
      )
    if changed:
      raise RefusedError(
        f"{self.workdir} holds a run with other settings "
        f"({'; '.join(changed)}): take another --workdir, or set them back"
      )
    return states.like(self.programs, record["phase"])

  def _resume(self, state: Tree, record: dict[str, Any]) -> Tree:
    self.position = Position(**record["position"])
    self.streams.set_state(record["streams"])
    logging.getLogger(__name__).info(
      "continuing at step %d of %d", self.position.step, self.plan.total_steps
    )
    return state

  def _record_run(self) -> None:
    metrics.write_run_record(
      self.workdir,
      config=self.config.to_mapping(),
      method=self.config.sync.method,
      num_replicas=self.config.mesh.num_replicas,
      parameter_count=shapes.parameter_count(self.config.model.shape),
      corpus_name=self.corpus.name,
      corpus_digest=self.corpus.digest,
      platform=jax.devices()[0].device_kind,
      command=self.command,
    )

  def _walk(
    self, state: Tree, recorder: metrics.Recorder, checkpoints: Checkpoints
  ) -> None:
    waiting: Dispatched | None = None
    title = self.config.sync.method
    step, total = self.position.step, self.plan.total_steps
    with Progress(title, total, step) as progress:
      for segment in self.plan.segments(step):
        state, current = self._dispatch(state, segment, recorder)
        if waiting:
          self._read(waiting, recorder, progress)
        waiting = current
        if segment.ends_phase:
          state = self._begin_local(state, segment.phase)
        if self._is_due(segment):
          self._read(waiting, recorder, progress)
          waiting = None
          self._evaluate_and_save(state, segment, recorder, checkpoints)
      if waiting:
        self._read(waiting, recorder, progress)
    self._finish(state, recorder, checkpoints)

  def _is_due(self, segment: Segment) -> bool:
    """Whether evaluation or a save follows (the end has its own)."""
    if segment.stop == self.plan.total_steps:
      return False
    return segment.crosses(
      self.config.evaluation.interval_steps
    ) or segment.crosses(self.config.checkpoint.interval_steps)

  def _dispatch(
    self, state: Tree, segment: Segment, recorder: metrics.Recorder
  ) -> tuple[Tree, Dispatched]:
    alone = segment.phase == "single"
    batches = self.streams.take(segment.num_steps, [0] if alone else None)
    started = time.perf_counter()
    with jax.transfer_guard("disallow"):
      if segment.phase == "local":
        state, seen, drifts = self.programs.rounds.round(
          state, batches, segment.windows
        )
      else:
        steps = self.programs.steps_of(segment.phase)
        state, seen = steps.steps(state, batches)
        drifts = []
    called = time.perf_counter()
    sent_bytes = self.traffic.segment_bytes(segment)
    if alone and segment.ends_phase:
      payload = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
      sent_bytes += broadcast_bytes(payload, self.config.mesh.num_replicas)
    replicas = 1 if alone else self.config.mesh.num_replicas
    tokens = segment.num_steps * self.config.tokens_per_replica_step * replicas
    self.position = Position(
      segment.stop,
      self.position.tokens + tokens,
      self.position.total_sent_bytes + sent_bytes,
    )
    if called - started > 1.0:  # Only tracing and compiling block a dispatch.
      recorder.record_timing(
        step=segment.stop, event="compile", wall_s=called - started
      )
      self._last_read = max(self._last_read, called)
    since = max(started, self._last_read)
    return state, Dispatched(
      segment, self.position, sent_bytes, seen, drifts, since
    )

  def _begin_local(self, state: SharedState, phase: str) -> RoundState:
    """Hands the warm start over: every replica gets parameters and state."""
    if phase == "single":  # From one device to where all replicas see it.
      state = self.programs.rounds.replicas.place(state, None)
    return self.programs.rounds.init(state.params, state.optimizer)

  def _read(
    self,
    done: Dispatched,
    recorder: metrics.Recorder,
    progress: Progress,
  ) -> None:
    """Waits for a segment's metrics, checks and records them."""
    seen, drifts = jax.device_get((done.metrics, done.drifts))
    now = time.perf_counter()
    wall_s = now - max(done.since, self._last_read)
    self._last_read = now
    segment, position = done.segment, done.position
    self._check_finite(seen, segment)
    recorder.record_round(
      step=position.step,
      tokens=position.tokens,
      phase=segment.phase,
      loss=np.mean(seen.loss, dtype=np.float64),
      loss_per_replica=np.mean(seen.loss, axis=1, dtype=np.float64),
      grad_norm=np.mean(seen.grad_norm, dtype=np.float64),
      learning_rate=self.programs.schedule(position.step - 1),
      sent_bytes=done.sent_bytes,
      total_sent_bytes=position.total_sent_bytes,
      drift=evaluation.drift_rows(segment, drifts, self.plan.local_start),
    )
    replicas = seen.loss.shape[0]
    tokens = segment.num_steps * self.config.tokens_per_replica_step * replicas
    speed = tokens / max(wall_s, 1e-9)
    recorder.record_timing(
      step=position.step, event="round", wall_s=wall_s, tokens_per_s=speed
    )
    loss = float(np.mean(seen.loss))
    progress.update(position.step, loss, speed, position.total_sent_bytes)

  def _check_finite(self, seen: StepMetrics, segment: Segment) -> None:
    place = evaluation.first_not_finite(seen.loss, seen.grad_norm)
    if place:
      replica, offset = place
      raise TrainingStoppedError(
        "the loss or its gradient is not finite at step "
        f"{segment.start + offset + 1} on replica {replica}: "
        f"{self._what_to_lower()}"
      )

  def _what_to_lower(self) -> str:
    return (
      f"lower inner.learning_rate={self.config.inner.learning_rate} or "
      f"outer.learning_rate={self.config.outer.learning_rate}; the last good "
      f"checkpoint in {self.workdir} is kept"
    )

  def _evaluate_and_save(
    self,
    state: Tree,
    segment: Segment,
    recorder: metrics.Recorder,
    checkpoints: Checkpoints,
  ) -> None:
    if segment.crosses(self.config.evaluation.interval_steps):
      losses = self._losses(state, recorder)
      recorder.record_evaluation(**losses, **self._totals())
    if segment.crosses(self.config.checkpoint.interval_steps):
      phase = self.plan.phase(segment.stop)
      self._save(state, phase, recorder, checkpoints)

  def _save(
    self,
    state: Tree,
    phase: str,
    recorder: metrics.Recorder,
    checkpoints: Checkpoints,
  ) -> None:
    started = time.perf_counter()
    record = {
      "position": dataclasses.asdict(self.position),
      "phase": phase,
      "streams": self.streams.get_state(),
      "config": self.config.to_mapping(),
      "corpus_digest": self.corpus.digest,
    }
    checkpoints.save(self.position.step, state, record)
    self._account("checkpoint", started, recorder)

  def _account(
    self, event: str, started: float, recorder: metrics.Recorder
  ) -> None:
    self._last_read = time.perf_counter()
    recorder.record_timing(
      step=self.position.step, event=event, wall_s=self._last_read - started
    )

  def _totals(self) -> dict[str, int]:
    return {
      "step": self.position.step,
      "tokens": self.position.tokens,
      "total_sent_bytes": self.position.total_sent_bytes,
    }

  def _losses(
    self, state: Tree, recorder: metrics.Recorder
  ) -> dict[str, float]:
    started = time.perf_counter()
    losses = evaluation.losses(self.programs, state, self.validation)
    self._account("evaluation", started, recorder)
    if not all(math.isfinite(loss) for loss in losses.values()):
      raise TrainingStoppedError(
        f"the validation loss is not finite at step {self.position.step}: "
        f"{self._what_to_lower()}"
      )
    return losses

  def _finish(
    self, state: Tree, recorder: metrics.Recorder, checkpoints: Checkpoints
  ) -> None:
    phase = self.plan.phase(self.plan.total_steps - 1)
    if phase == "local":
      step = self.plan.total_steps - self.plan.local_start
      state = self.programs.rounds.flush(state, step)
      self.position.total_sent_bytes += self.traffic.flush_bytes(step)
    losses = self._losses(state, recorder)
    recorder.record_final(
      num_steps=self.plan.total_steps, **losses, **self._totals()
    )
    self.position.is_finished = True
    self._save(state, phase, recorder, checkpoints)
