"""Computes what is recorded of a state or a segment, and checks it.

Between processes lies a slow link, and the plan counts the bytes of exchanges
alone. So nothing here sends parameters from one process to another, with one
exception, whose bytes are counted (`_sent_bytes`).
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
  parts: Iterable[Tree],
  judging: Iterable[Tree] | None = None,
) -> tuple[dict[str, Any], int]:
  """Computes validation losses of three views of a state, in nats a token.

  Args:
    programs: Programs of the run.
    state: State of all replicas.
    parts: Held-out tokens, arrays [N, B, L + 1] of any sizes, or trees of
      examples. Every predicted token, or example, has the same weight.
    judging: More of them, for the outer parameters alone.

  Returns:
    "outer_loss" (outer parameters), "mean_loss" (the replicas' mean),
    "replica_loss" (replica 0) and, if it is asked for, "judge_loss". The mean
    is None where replicas have processes of their own, as it would have to be
    sent. And the bytes that a replica sent for them (`_sent_bytes`).
  """

  def loss(params: Tree, parts: Iterable[Tree] = parts) -> float:
    return _mean_loss(programs, programs.evaluate, params, parts)

  def first(params: Tree, batches: Tree) -> float:
    return arrays_to_host(programs.evaluate_each(params, batches))[0]

  kept = params_to_keep(programs, state)
  found = {"outer_loss": loss(kept)}
  if isinstance(state, SharedState):  # All replicas are alike.
    # With an average the replicas go on from other parameters.
    is_newest = kept is state.params
    newest = found["outer_loss"] if is_newest else loss(state.params)
    found |= {"mean_loss": newest, "replica_loss": newest}
  elif jax.process_count() > 1:
    own = _mean_loss(programs, first, state.replica.params, parts)
    found |= {"mean_loss": None, "replica_loss": own}
  else:
    found["mean_loss"] = loss(mean_of(state.replica.params))
    found["replica_loss"] = loss(_first(state.replica.params))
  if judging is not None:
    found["judge_loss"] = loss(kept, judging)
  return found, _sent_bytes(programs, state)


def params_to_keep(programs: Programs, state: TrainingState) -> Tree:
  """Returns the parameters that a run evaluates and hands on.

  Args:
    programs: Programs of the run.
    state: State of all replicas.
  """
  if isinstance(state, SharedState):
    return parameters_to_keep(state.optimizer, state.params)
  return programs.rounds.outer_params(state)


def _sent_bytes(programs: Programs, state: TrainingState) -> int:
  """Returns the bytes that a replica sends to others in an evaluation.

  They are 0 unless the outer parameters differ by replica, so that their mean
  is evaluated, and replicas have processes of their own.
  """
  is_shared = isinstance(state, SharedState) or programs.rounds.outer.is_shared
  if is_shared or jax.process_count() == 1:
    return 0
  summed = AllReduce(4 * programs.parameter_count)
  return summed.sent_bytes(programs.rounds.replicas.num_replicas)


def _mean_loss(
  programs: Programs,
  evaluate: Callable[[Tree, Tree], Any],
  params: Tree,
  parts: Iterable[Tree],
) -> float:
  """Returns the mean loss of all predicted tokens, in nats.

  The devices of the replicas compute it: one device, or all of a mesh.
  """
  total, num_predicted = 0.0, 0
  for part in parts:
    batches = programs.rounds.replicas.place(part, None)
    weight = num_predictions(part)
    total += weight * float(evaluate(params, batches))
    num_predicted += weight
  return total / num_predicted


@jax.jit
def _first(tree: Tree) -> Tree:
  return jax.tree.map(lambda leaf: leaf[0], tree)


def check_losses(metrics: StepMetrics, segment: Segment) -> None:
  """Checks that the metrics of a segment's steps are finite.

  Args:
    metrics: Losses and gradient norms, [M, num_steps], on the host.
    segment: The segment that was run.

  Raises:
    NotFiniteError: One line that names the earliest step, and of the replicas
      that are not finite there the first.
  """
  is_bad = ~np.isfinite(np.stack(metrics)).all(axis=0)
  if is_bad.any():
    offset, replica = np.argwhere(is_bad.T)[0]
    raise NotFiniteError(
      "the loss or its gradient is not finite at step "
      f"{segment.start + offset + 1} on replica {replica}"
    )


def applied_events(segment: Segment) -> list[Event]:
  """Returns the exchanges that a segment applies, in order."""
  return [window.applied for window in segment.windows if window.applied]


def step_means(
  values: np.ndarray, participation: RoundParticipation | None
) -> tuple[float, list[float]]:
  """Averages a metric over the inner steps that replicas took.

  Args:
    values: Metric of every step, [M, num_steps]; a replica's own steps first.
    participation: Steps of each replica; None: all take all of them.

  Returns:
    The mean over all steps of all replicas, and over the steps of each replica,
    [M]; NaN if it took none.
  """
  taken = list(np.asarray(values, np.float64))
  if participation:
    taken = [x[:n] for x, n in zip(taken, participation.num_steps, strict=True)]
  each = [float(own.mean()) if own.size else math.nan for own in taken]
  return float(np.mean(np.concatenate(taken))), each


def check_drifts(
  exchanges: Sequence[Drift],
  steps: Sequence[int],
  participation: RoundParticipation | None = None,
) -> None:
  """Checks that what every replica sent is finite; says who was left out.

  A replica that is not finite is left out of the mean, and rules that reset
  replicas would then hide that it has diverged. Its drift still shows it.

  Args:
    exchanges: Drift of every exchange, on the host.
    steps: Inner step of the run at which each exchange was sent.
    participation: Who takes part in them; None: all replicas.

  Raises:
    NotFiniteError: One line that names the replica and the step.
  """
  takes_part = _participants(exchanges, participation)
  for step, exchange, takes in zip(steps, exchanges, takes_part, strict=True):
    finite = np.isfinite(exchange.own_squared) | ~takes
    if not finite.all():
      raise NotFiniteError(
        f"the norm of the pseudo-gradient is not finite at step {step} on "
        f"replica {int(np.argmin(finite))}"
      )
    # One that meets others in a store says itself why it is left out.
    has_sent_nothing = takes & (exchange.own_squared == 0)
    if len(takes) > 1:
      for replica in np.flatnonzero(
        has_sent_nothing & (exchange.mean_squared > 0)
      ):
        logging.getLogger(__name__).warning(
          f"step {step}: replica {replica} is left out: its norm is over"
          " exchange.max_norm_ratio times the usual, or not finite"
        )


def _participants(
  exchanges: Sequence[Drift], participation: RoundParticipation | None
) -> list[np.ndarray]:
  """Returns who takes part in every exchange, booleans [M]."""
  if participation:
    return participation.participants
  return [np.ones(np.shape(each.own_squared), bool) for each in exchanges]


def drift_rows(
  segment: Segment, exchanges: Sequence[Drift], energy_share: float
) -> list[dict[str, Any]]:
  """Returns the drifts of a segment, one row for each exchange applied.

  Args:
    segment: The segment that was run.
    exchanges: Drift of every exchange that it applies, on the host.
    energy_share: Share of an update's energy by which its rank is counted.
  """
  takes_part = _participants(exchanges, segment.participation)
  events = applied_events(segment)
  rows = []
  for event, drift, takes in zip(events, exchanges, takes_part, strict=True):
    # A replica that has sent nothing was left out; the mean is of the others.
    has_sent = (drift.own_squared != 0) | (drift.mean_squared == 0)
    counts = takes & has_sent
    if not counts.any():
      continue
    mean_squared = np.asarray(drift.mean_squared)
    found = disagreement(
      drift.own_squared[counts],
      drift.apart_squared[counts],
      mean_squared[counts] if mean_squared.ndim else mean_squared,
    )
    rows.append(
      {
        "fragment": event.fragment,
        "step": event.send_step + segment.schedule_start,
        **found._asdict(),
        **_recorded(drift.observed, energy_share),
      }
    )
  return rows


def _recorded(observed: dict[str, Any], energy_share: float) -> dict[str, Any]:
  """Returns what an aggregator observes, and the ranks of a low-rank update.

  Eigenvalues of every matrix are computed on the host. Of large updates it has
  only some, or none (`codecs.low_rank.grams`).
  """
  small = {k: x for k, x in observed.items() if np.ndim(x) < 3}
  named = {name: np.asarray(x).tolist() for name, x in small.items()}
  recorded: dict[str, Any] = {"observed": named} if named else {}
  if spectra := spectra_of(observed):
    ranks = [each.shape[1] for each in spectra.values()]
    recorded["rank"] = float(np.mean(ranks))
    recorded["energy_rank"] = energy_rank(spectra, energy_share)
  return recorded
