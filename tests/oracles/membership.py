"""Replicas that are away for some rounds, or slower than others, in numpy.

`reference.methods` trains replicas that are all alike. Here each has its own
rounds and its own pace, and three things change:

    a replica that is away   takes no step; what it has in flight is left out
    one that comes back      starts as a copy: w_m = theta, the inner optimizer
                             of the first replica that was present, no residual
    one with h_m of H steps  takes step k where floor(t h_m / H) reaches k, and
                             counts h_m / (sum over k of h_k) in the mean

The weighted mean is the plain mean of pseudo-gradients that were scaled before,

    sum over m of h_m Delta_m / sum over m of h_m
      = mean over m of (h_m / mean of h) Delta_m

so every exchange serves as it is. What is left out is NaN, which exchanges
leave out of their mean.

The fast code: plan/schedule/membership.py, `RoundStates.rejoined` in
outer/round_states.py, and the weight of `OuterStep.exchange`.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dilocox_jax.reference.exchanges import Arrays, Mean, zeros_like
from dilocox_jax.reference.methods import (
  Fragment,
  LossAndGradient,
  Result,
  delays_of,
  rounds_of,
)


def train_apart(
  loss_and_gradient: LossAndGradient,
  params: Arrays,
  batches: Sequence[Sequence[Any]],
  *,
  away: Sequence[tuple[int, int]],
  inner_steps: Sequence[int],
  inner: Any,
  outer: Any,
  sync_interval: int,
  overlap_steps: int = 0,
  rule: str = "reset",
  mixing_alpha: float = 0.0,
  fragments: Sequence[Sequence[str]],
  exchange: Any = None,
  keep_unsent: bool = False,
  flush: bool = True,
) -> Result:
  """Trains replicas of which some are away, and some are slow.

  Args:
    loss_and_gradient: The model and its loss.
    params: Where every replica and theta start.
    batches: Batches by replica and step. A replica reads the first h_m of each
      round's H batches.
    away: Pairs (replica, round from 0).
    inner_steps: h_m of every replica; H is the pace of a full one.
    inner: Optimizer of the replicas; its `count` is that of its learning rate.
    outer: Optimizer of theta; each fragment gets a copy.
    sync_interval: H.
    overlap_steps: tau.
    rule: "reset", "continue" or "mix".
    mixing_alpha: Weight of the replica's own value, for "mix" only.
    fragments: Names of each fragment.
    exchange: Averages a fragment; each fragment gets a copy.
    keep_unsent: Whether a replica keeps what the exchange did not send.
    flush: Whether everything pending and unsent is applied at the end.
  """
  num_replicas = len(batches)
  num_steps = len(batches[0])
  everyone = range(num_replicas)
  replicas = [dict(params) for _ in everyone]
  optimizers = [copy.deepcopy(inner) for _ in everyone]
  present = np.ones(num_replicas, bool)
  rounds = rounds_of(num_steps, sync_interval)
  parts = [
    WeightedFragment(
      replicas=replicas,
      names=list(each),
      theta={name: params[name] for name in each},
      delays=delays_of(
        rounds, number, len(fragments), overlap_steps, sync_interval
      ),
      sync_interval=sync_interval,
      overlap_steps=overlap_steps,
      rule=rule,
      mixing_alpha=mixing_alpha,
      keep_unsent=keep_unsent,
      outer=copy.deepcopy(outer),
      exchange=copy.deepcopy(exchange) if exchange else Mean(),
      pace=np.asarray(inner_steps) * present,
    )
    for number, each in enumerate(fragments)
  ]
  losses = np.zeros([num_replicas, num_steps])
  snapshots = []
  for step in range(1, num_steps + 1):
    round_index, tick = divmod(step - 1, sync_interval)
    if tick == 0:
      before = present
      present = np.array([(m, round_index) not in away for m in everyone])
      source_replica = int(np.argmax(before))
      for m in np.flatnonzero(present & ~before):
        optimizers[m] = copy.deepcopy(optimizers[source_replica])
      for part in parts:
        part.attend(present, np.asarray(inner_steps), present & ~before)
    for m, w in enumerate(replicas):
      pace = inner_steps[m] * bool(present[m])
      done = tick * pace // sync_interval
      if (tick + 1) * pace // sync_interval == done:
        continue
      batch = batches[m][round_index * sync_interval + done]
      place = round_index * sync_interval + done
      losses[m, place], gradient = loss_and_gradient(w, batch)
      w.update(optimizers[m].step(w, gradient))
    for part in parts:
      part.run_events(step)
    if tick + 1 == sync_interval:
      for m in everyone:  # All have the learning rate of the run.
        optimizers[m].count += sync_interval - inner_steps[m] * int(present[m])
      snapshots.append(_theta(parts, params))
  if flush:
    for part in parts:
      part.flush(num_steps)
  return Result(_theta(parts, params), replicas, losses, snapshots)


@dataclasses.dataclass
class WeightedFragment(Fragment):
  """One fragment whose mean is weighted.

  Attributes:
    pace: Inner steps of each replica in this round; 0 for who is away.
    shares: The pace of the replicas in every exchange that is not applied yet,
      the oldest first; 0 for who is left out.
  """

  pace: Any = None
  shares: list = dataclasses.field(default_factory=list)

  def attend(self, present, inner_steps, returning) -> None:
    """Begins a round: drops what the absent have in flight, copies theta."""
    self.pace = inner_steps * present
    for share in self.shares:
      share[~present] = 0
    for m in np.flatnonzero(returning):
      self.replicas[m].update({n: self.theta[n] for n in self.names})
      for _, sent in self.in_flight:
        sent[m] = zeros_like(sent[m])
      residuals = getattr(self.exchange, "residuals", None)
      if residuals:
        residuals[m] = zeros_like(residuals[m])

  def measure(self) -> list[Arrays]:
    """The pseudo-gradient of every replica, and who takes part."""
    self.shares.append(self.pace.copy())
    return super().measure()

  def apply(self, deltas: list[Arrays]) -> None:
    """The same with weights; see `Fragment.apply`."""
    share = self.shares.pop(0)
    old = self.theta
    weights = share * (np.count_nonzero(share) / max(share.sum(), 1))
    scaled = [
      {name: delta[name] * (weight if weight else np.nan) for name in delta}
      for delta, weight in zip(deltas, weights, strict=True)
    ]
    mean, sent = self.exchange.average(scaled)
    self.theta = new = self.outer.step(old, mean)
    for m, w in enumerate(self.replicas):
      for name in self.names:
        own = deltas[m][name]
        w[name] = self.rejoin(w[name], old[name], new[name], own)
        if self.keep_unsent and weights[m]:
          w[name] = w[name] - (own - sent[m][name] / weights[m])


def _theta(parts: Sequence[Fragment], params: Arrays) -> Arrays:
  leaves: Arrays = {}
  for part in parts:
    leaves |= part.theta
  return {name: leaves[name] for name in params}
