"""Runs a round as several programs, the exchange in a thread of its own.

A round is one program where the compiler runs transfers beside the inner steps
(`round_program`). XLA's CPU backend does not: there a collective blocks the
thread that runs the program, and programs that one thread dispatches run one
after the other. So the exchange of a window is dispatched by a second thread:

    main thread      | inner steps             | wait | apply, more steps, send
    exchange thread  | exchange (slow link)           |

The programs consist of the same functions as the round's one program, in the
same order of data. They give the same bits, unless the compiler rounds
a * b + c once where both operations stand in one program. It does so on CPUs
with such an instruction, and the results then differ by about 1e-7 relative.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer import round_program
from dilocox_jax.outer.drift import Drift, axes_of
from dilocox_jax.outer.round_program import (
  Carry,
  InnerStep,
  RoundState,
  StepMetrics,
)
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.outer.transforms import OuterState, OuterTransform
from dilocox_jax.plan.schedule.window_groups import WindowGroup, WindowTable
from dilocox_jax.pytypes import Array, Index, Tree


class ExchangeThread:
  """The thread that dispatches exchanges, and the time spent waiting for it."""

  def __init__(self):
    """Starts no thread yet."""
    self._thread = ThreadPoolExecutor(1, "exchange")
    self._exposed_s = 0.0

  def start(self, exchange, *arguments) -> Future:
    """Runs an exchange in the thread; its error comes up in `wait`."""
    return self._thread.submit(
      lambda: jax.block_until_ready(exchange(*arguments))
    )

  def wait(self, exchange: Future, beside: Tree):
    """Returns the result of an exchange.

    Args:
      exchange: What `start` returned.
      beside: Results of the inner steps that hide it.
    """
    jax.block_until_ready(beside)
    start_s = time.perf_counter()
    result = exchange.result()
    self._exposed_s += time.perf_counter() - start_s
    return result

  def newly_exposed_s(self) -> float:
    """Returns the seconds that steps waited for exchanges since the last call.

    That is time in which inner steps had ended and the exchange beside them had
    not.
    """
    exposed_s, self._exposed_s = self._exposed_s, 0.0
    return exposed_s


@dataclasses.dataclass(frozen=True, eq=False)
class ThreadedRounds:
  """Runs rounds whose exchanges another thread dispatches.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients.
    inner_step: Optimizer step of one replica.
    replicas: Number of replicas, and their devices.
    axes: Replica axes of the state, a tree prefix.
    thread: Thread of the exchanges.
  """

  outer: OuterTransform
  inner_step: InnerStep
  replicas: Replicas
  axes: RoundState
  thread: ExchangeThread

  def hides(self, groups: Sequence[WindowGroup]) -> bool:
    """Whether any of these windows has an exchange to hide behind its steps."""
    return any(
      round_program.starts_exchange(self.outer, group) for group in groups
    )

  def round(
    self,
    state: RoundState,
    batches: Tree,
    groups: Sequence[WindowGroup],
    tables: Sequence[WindowTable],
  ) -> tuple[RoundState, StepMetrics, list[Drift]]:
    """Runs windows of the plan, as `RoundPrograms.round` does, to their end.

    Args:
      state: State of all replicas; its memory is used again.
      batches: Leaves [M, H, ...] on the devices.
      groups: Window groups of a round, or of its first part.
      tables: Numbers of the windows, one table for each group, on the host.
    """
    metrics = self._no_metrics(jax.tree.leaves(batches)[0].shape[1])
    step, drifts = self.replicas.place(np.int32(0), None), []
    for group, table in zip(groups, tables, strict=True):
      for row in np.stack(table[:-1], axis=1):  # Without weights.
        state, step, metrics, drift = self._window(
          group, row, state, step, metrics, batches
        )
        drifts += [drift] if group.applied else []
    return state, metrics, drifts

  def _no_metrics(self, num_steps: int) -> StepMetrics:
    shape = (self.replicas.num_replicas, num_steps)
    zeros: Any = np.zeros(shape, np.float32)
    return self.replicas.place(StepMetrics(zeros, zeros), 0)

  def _window(self, group, row, state, step, metrics, batches):
    """Runs one window, whose numbers are on the host in `row`."""
    numbers = self.replicas.place(row, None)
    exchange = None
    if round_program.starts_exchange(self.outer, group):
      kept, rest = state.outer.exchange, state.outer._replace(exchange=None)
      exchange = self.thread.start(self._exchange(group), kept, rest, numbers)
    inner = state.replica, step, metrics
    if WindowTable(*row).steps_before:
      inner = self._steps(*inner, batches, numbers)
    result = None
    if exchange:
      kept, result = self.thread.wait(exchange, inner)
      state = state._replace(outer=state.outer._replace(exchange=kept))
    replica, step, metrics = inner
    state = state._replace(replica=replica)
    return self._end(group)(state, step, metrics, batches, numbers, result)

  @functools.cache  # noqa: B019 - programs live as long as the run.
  def _exchange(self, group: WindowGroup):
    """The jitted program (kept by the exchange, other state, row)."""

    def replica_program(kept: Tree, rest: OuterState, row: Array):
      state, result = round_program.start_exchange(
        self.outer, group, rest._replace(exchange=kept), WindowTable(*row)
      )
      return self._divided(state.exchange, result)

    outer = self.axes.outer
    axes = outer.exchange, outer._replace(exchange=None), None
    mapped = self.replicas.map(
      replica_program, axes, (outer.exchange, self._result_axes)
    )
    return jax.jit(mapped, donate_argnums=0)

  @property
  def _result_axes(self) -> ExchangeResult:
    """Replica axes of the result of an exchange, a tree prefix."""
    shared: Any = None if self.outer.aggregator.is_shared else 0
    per_replica: Any = 0
    unstacked: Any = None
    return ExchangeResult(shared, per_replica, per_replica, unstacked)

  def _divided(self, kept: Tree, result: Any):
    divided = self.replicas.divided
    trees = divided(result._replace(observed={}))
    return divided(kept), trees._replace(observed=result.observed)

  @functools.cached_property
  def _steps(self):
    """The jitted program of the inner steps before a window's apply."""

    def replica_program(replica, step: Index, metrics, batches, row: Array):
      run_steps = round_program.inner_steps(self.inner_step, batches)
      no_outer_state: Any = None
      carry = Carry(no_outer_state, replica, step, metrics)
      carry = run_steps(carry, WindowTable(*row).steps_before)
      return self.replicas.divided(carry.replica), carry.step, carry.metrics

    inner_axes = self.axes.replica, None, 0
    mapped = self.replicas.map(
      replica_program, (*inner_axes, 0, None), inner_axes
    )
    return jax.jit(mapped, donate_argnums=(0, 2))

  @functools.cache  # noqa: B019 - as above.
  def _end(self, group: WindowGroup):
    """The jitted program of what follows these steps."""

    def replica_program(
      state: RoundState, step: Index, metrics, batches, row: Array, result
    ):
      run_steps = round_program.inner_steps(self.inner_step, batches)
      carry, drift = round_program.end_window(
        self.outer,
        run_steps,
        group,
        Carry(*state, step, metrics),
        WindowTable(*row),
        result,
      )
      drift = jax.tree.map(lambda leaf: leaf[None], drift)
      state = self.replicas.divided(RoundState(carry.outer, carry.replica))
      return state, carry.step, carry.metrics, drift

    drift_axes = axes_of(self.outer.aggregator.is_shared)
    starts = round_program.starts_exchange(self.outer, group)
    mapped = self.replicas.map(
      replica_program,
      (self.axes, None, 0, 0, None, self._result_axes if starts else None),
      (self.axes, None, 0, drift_axes if group.applied else None),
    )
    return jax.jit(mapped, donate_argnums=(0, 2))
