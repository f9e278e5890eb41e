"""Evaluates the parameters of a run, and checks and averages its metrics.

A *drift* says how far the replicas were from their mean in an exchange, which
averages the replicas' pseudo-gradients of a fragment (a part of the
parameters). A segment is a part of a run, such as a round.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from dilocox_jax.data.feeds import num_predictions
from dilocox_jax.distributed.coordinator_store import arrays_to_host
from dilocox_jax.outer.average import parameters_to_keep
from dilocox_jax.outer.drift import Drift, disagreement
from dilocox_jax.plan.adaptive import energy_rank, spectra_of
from dilocox_jax.plan.operations import AllReduce
from dilocox_jax.plan.schedule.membership import RoundParticipation
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.schedule.sync_schedule import Event
from dilocox_jax.rounds.data_parallel import SharedState
from dilocox_jax.rounds.states import mean_of
from dilocox_jax.rounds.window import StepMetrics
from dilocox_jax.training.build import Programs
from dilocox_jax.training.states import NotFiniteError, TrainingState
from dilocox_jax.trees import Tree


def losses(
  programs: Programs,
  state: TrainingState,
  validation: Iterable[Tree],
  judging: Iterable[Tree] | None = None,
) -> tuple[dict[str, Any], int]:
  """Computes validation losses of a state, in nats a token.

  Args:
    programs: Programs of the run.
    state: State of this program's replicas (with a mailbox, a single one).
    validation: Held-out batches, at least one: arrays of token ids
      [N, B, L + 1] of any sizes, or trees of examples. They are read several
      times, so they must not be an iterator. Every predicted token, or example,
      has the same weight.
    judging: Batches of the judge text, which only the last evaluation of a run
      reads. None: this is not the last evaluation, or there is no such text.

  Returns:
    The losses by name, and the bytes that a replica sent to compute them. The
    names are:

    - "outer_loss": loss of the parameters of `params_to_keep`.
    - "mean_loss": loss of the mean of the replicas' parameters. During rounds
      it is None if there are several processes.
    - "replica_loss": loss of replica 0, or with a mailbox of the only replica
      of this program.
    - "judge_loss": loss of the parameters of `params_to_keep` on `judging`. It
      is missing if `judging` is None.

    If all replicas share their parameters (`SharedState`), "mean_loss" and
    "replica_loss" are both the loss of the shared parameters.
  """

  def loss(params: Tree, batches: Iterable[Tree] = validation) -> float:
    return _mean_loss(programs, programs.evaluate, params, batches)

  def loss_of_first_replica(params: Tree, batches: Tree) -> float:
    return arrays_to_host(programs.evaluate_each(params, batches))[0]

  outer_params = params_to_keep(programs, state)
  losses_by_name: dict[str, float | None] = {"outer_loss": loss(outer_params)}
  if isinstance(state, SharedState):
    # All replicas have equal parameters. They differ from the outer parameters
    # if these are an average over the steps.
    shared_loss = losses_by_name["outer_loss"]
    if outer_params is not state.params:
      shared_loss = loss(state.params)
    losses_by_name["mean_loss"] = shared_loss
    losses_by_name["replica_loss"] = shared_loss
  elif jax.process_count() > 1:
    losses_by_name["mean_loss"] = None
    losses_by_name["replica_loss"] = _mean_loss(
      programs, loss_of_first_replica, state.replica.params, validation
    )
  else:
    losses_by_name["mean_loss"] = loss(mean_of(state.replica.params))
    losses_by_name["replica_loss"] = loss(_first(state.replica.params))
  if judging is not None:
    losses_by_name["judge_loss"] = loss(outer_params, judging)
  return losses_by_name, _sent_bytes(programs, state)


def params_to_keep(programs: Programs, state: TrainingState) -> Tree:
  """Returns the parameters that a run evaluates and exports.

  During rounds they are the outer parameters. If each replica has its own, they
  are the mean over the replicas. In a `SharedState` they are the parameters
  that all replicas share. If the run keeps an average of these parameters over
  the steps, the average is returned instead.
  """
  if isinstance(state, SharedState):
    return parameters_to_keep(state.optimizer, state.params)
  return programs.rounds.outer_params(state)


def _sent_bytes(programs: Programs, state: TrainingState) -> int:
  """Returns the bytes that a replica sends to others in an evaluation.

  It sends bytes only if there are several processes and each replica has outer
  parameters of its own, which the replicas then average in fp32.
  """
  is_shared = isinstance(state, SharedState) or programs.rounds.outer.is_shared
  if is_shared or jax.process_count() == 1:
    return 0
  float32_bytes = 4 * programs.parameter_count
  num_replicas = programs.rounds.replicas.num_replicas
  return AllReduce(float32_bytes).sent_bytes(num_replicas)


def _mean_loss(
  programs: Programs,
  evaluate: Callable[[Tree, Tree], Any],
  params: Tree,
  validation: Iterable[Tree],
) -> float:
  """Returns the mean loss over all held-out batches, in nats a prediction.

  The function `evaluate` returns the mean loss of batches [N, B, ...].
  """
  total_loss = 0.0
  num_predicted = 0
  for host_batches in validation:
    batches = programs.rounds.replicas.place(host_batches, None)
    weight = num_predictions(host_batches)
    total_loss += weight * float(evaluate(params, batches))
    num_predicted += weight
  return total_loss / num_predicted


@jax.jit
def _first(tree: Tree) -> Tree:
  """Returns the values of replica 0 from a tree with leaves [M, ...]."""
  return jax.tree.map(lambda leaf: leaf[0], tree)


def check_losses(metrics: StepMetrics, segment: Segment) -> None:
  """Checks that the losses and gradient norms of a segment are finite.

  A segment is a part of a run, such as a round.

  Raises:
    NotFiniteError: If a value is not finite. The message names the first step
      with such a value, and a replica that has it.
  """
  is_bad = ~np.isfinite(np.stack(metrics)).all(axis=0)
  if is_bad.any():
    # Steps are in front after the transposition, so the earliest is found.
    offset, replica = np.argwhere(is_bad.T)[0]
    raise NotFiniteError(
      "the loss or its gradient is not finite at step "
      f"{segment.start + offset + 1} on replica {replica}"
    )


def applied_events(segment: Segment) -> list[Event]:
  """Returns the exchanges whose means a segment, e.g. a round, applies.

  Each `Event` names a fragment (a part of the parameters) and two steps of the
  schedule. After the step `send_step` the fragment's pseudo-gradients were
  measured. After the step `step` their mean is applied.
  """
  return [window.applied for window in segment.windows if window.applied]


def step_means(
  values: np.ndarray, participation: RoundParticipation | None
) -> tuple[float, list[float]]:
  """Averages a metric over the inner steps that replicas took.

  Args:
    values: Metric of every step, [M, num_steps]. If a replica took only n
      steps, the first n values of its row count.
    participation: Steps of each replica; None means that all replicas took all
      steps.

  Returns:
    The mean over all steps of all replicas, and a list of M means over the
    steps of each replica. The mean of a replica without steps is NaN.
  """
  values_of_replicas = list(np.asarray(values, np.float64))
  if participation:
    values_of_replicas = [
      of_replica[:num_steps]
      for of_replica, num_steps in zip(
        values_of_replicas, participation.num_steps, strict=True
      )
    ]
  means = []
  for of_replica in values_of_replicas:
    if of_replica.size:
      means.append(float(of_replica.mean()))
    else:
      means.append(math.nan)
  return float(np.mean(np.concatenate(values_of_replicas))), means


def check_drifts(
  exchanges: Sequence[Drift],
  steps: Sequence[int],
  participation: RoundParticipation | None = None,
) -> None:
  """Checks that the pseudo-gradients that replicas sent are finite.

  A filter (`exchange.max_norm_ratio`) leaves a replica out of a mean if its
  norm is too large or not finite. Then a warning is logged, and nothing is
  raised. With a mailbox, this function logs nothing.

  Args:
    exchanges: For every exchange, norms of the pseudo-gradients as they were
      sent, on the host. The norm is 0 for a replica that a filter left out.
    steps: For every exchange, the inner step of the run after which the
      pseudo-gradients were measured.
    participation: Says which replicas take part in each exchange; None: all do.

  Raises:
    NotFiniteError: If the norm is not finite for a replica that takes part and
      was not left out. The message names the replica and the step.
  """
  participants = _participants(exchanges, participation)
  for step, drift, takes_part in zip(
    steps, exchanges, participants, strict=True
  ):
    is_finite = np.isfinite(drift.own_squared) | ~takes_part
    if not is_finite.all():
      # `argmin` finds the first replica that is not finite.
      raise NotFiniteError(
        f"the norm of the pseudo-gradient is not finite at step {step} on "
        f"replica {int(np.argmin(is_finite))}"
      )
    if len(takes_part) == 1:
      continue  # With a mailbox, each replica logs its own rejection.
    for replica in np.flatnonzero(takes_part & _is_left_out(drift)):
      logging.getLogger(__name__).warning(
        "step %d: replica %d is left out: its norm is over"
        " exchange.max_norm_ratio times the usual, or not finite",
        step,
        replica,
      )


def _is_left_out(drift: Drift) -> np.ndarray:
  """Returns which replicas a filter or a mailbox left out of a mean, [M]."""
  if drift.is_left_out is not None:
    return np.asarray(drift.is_left_out)
  if np.size(drift.own_squared) == 1:
    # With a mailbox, each replica has a drift of its own. It sent zeros if its
    # message is not in the mean. (If nobody made progress, the mean is zero.)
    return (drift.own_squared == 0) & (drift.mean_squared > 0)
  return np.zeros(np.shape(drift.own_squared), bool)


def _participants(
  exchanges: Sequence[Drift], participation: RoundParticipation | None
) -> list[np.ndarray]:
  """Returns which replicas take part in each exchange, booleans [M]."""
  if participation:
    return participation.participants
  return [np.ones(np.shape(drift.own_squared), bool) for drift in exchanges]


def drift_rows(
  segment: Segment, exchanges: Sequence[Drift], energy_share: float
) -> list[dict[str, Any]]:
  """Returns the drifts of a segment as rows for `metrics.jsonl`.

  Args:
    segment: A part of the run, such as a round, that has ended.
    exchanges: Drift of every exchange that the segment applies, on the host.
    energy_share: Share of an update's squared norm that the largest singular
      values must hold; their number is the energy rank.

  Returns:
    One row for each applied exchange: the fragment, the step after which its
    pseudo-gradients were measured, norms and cosines, and observations of the
    aggregator. An exchange to which no replica contributed has no row.
  """
  participants = _participants(exchanges, segment.participation)
  events = applied_events(segment)
  rows = []
  for event, drift, takes_part in zip(
    events, exchanges, participants, strict=True
  ):
    is_counted = takes_part & ~_is_left_out(drift)
    if not is_counted.any():
      continue
    mean_squared = np.asarray(drift.mean_squared)
    # With an axis [M], each replica has a mean of its own.
    if mean_squared.ndim:
      mean_squared = mean_squared[is_counted]
    # The schedule counts its steps from `schedule_start`.
    row = {
      "fragment": event.fragment,
      "step": event.send_step + segment.schedule_start,
    }
    row |= disagreement(
      drift.own_squared[is_counted],
      drift.apart_squared[is_counted],
      mean_squared,
    )._asdict()
    row |= _observed_columns(drift.observed, energy_share)
    rows.append(row)
  return rows


def _observed_columns(
  observed: dict[str, Any], energy_share: float
) -> dict[str, Any]:
  """Returns the columns of a row for the values that an aggregator observed.

  Arrays with three axes are Gram matrices of low-rank updates. They give
  "rank", the mean number of columns of the factors, and "energy_rank", how many
  singular values hold `energy_share` of the squared norm. The other values are
  in "observed", by name.
  """
  columns: dict[str, Any] = {}
  values_by_name = {
    name: np.asarray(values).tolist()
    for name, values in observed.items()
    if np.ndim(values) < 3
  }
  if values_by_name:
    columns["observed"] = values_by_name
  spectra = spectra_of(observed)
  if spectra:
    ranks = [spectrum.shape[1] for spectrum in spectra.values()]
    columns["rank"] = float(np.mean(ranks))
    columns["energy_rank"] = energy_rank(spectra, energy_share)
  return columns
