"""Trains replicas with the methods of the papers, step by step, in plain numpy.

M replicas train on their own batches. The parameters are divided into P
*fragments*, which are lists of names of leaves. Every fragment has *outer
parameters* theta, which all replicas share. (With the rule "eager", each
replica has its own.) Replica m has the parameters w_m. Every H inner steps, the
following happens to a fragment:

    measure  Delta_m = theta - w_m                  (the pseudo-gradient)
    average  Delta   = mean over m of Delta_m       (the only communication)
    step     theta'  = Outer(theta, Delta)          (an optimizer, which takes
                                                     Delta for the gradient)
    rejoin   w_m     = Rule(w_m, theta, theta', Delta_m)
                                                    (the apply rule)

Most methods are calls of `train` that differ in H, P, the delay tau, the apply
rule, and the message, which is how Delta_m is sent:

    method              H     P  tau    rule        message
    diloco              H     1  0      reset       Delta
    open_diloco         500   1  0      reset       Delta in fp16
    streaming_diloco    H     P  tau    mix         Delta in 4 bits (E3M0)
    eager               H     1  H      eager       Delta
    dilocox             H     1  H      reset or    Delta, low rank and 4 bits
                                        continue
    sparse_loco         H     1  0      reset       top-k of Delta in 2 bits
    muloco              H     1  0      reset       Delta in 2 bits; Muon is the
                                                    inner optimizer
    overlap_loco        H     P  H / P  continue    Delta in 1 bit; Muon is the
                                                    inner optimizer
    delayed             any   P  any    any         any

The apply rules:

    reset       w_m = theta'
    mix         w_m = alpha w_m + (1 - alpha) theta'
    continue    w_m = w_m + (theta' - theta) + Delta_m
    eager       see `EagerFragment`

The methods `allreduce` and `cocktail_sgd` average gradients at every step
instead (`train_on_mean_gradient`).

The delay tau is a number of inner steps: the mean of the pseudo-gradients of
step s is applied after step s + tau. So their transfer may take as long as tau
inner steps. Fragment p is measured after the steps s > 0 with
(s - t_p) mod H = 0, where t_p = floor(p H / P) is its offset.
Example: H = 6, P = 3, tau = 2. Fragment 1 has offset 2. It is measured after
steps 2, 8, 14, ..., and the means are applied after steps 4, 10, 16, ...

The fast code has the same parts in these files:

    when a fragment is sent and applied       plan/schedule/sync_schedule.py
    the order of events on one step           outer/events.py
    measure and apply                         outer/outer_step.py
    the sign of Delta, and the apply rules    outer/rules.py
    the average                               aggregators/
    the inner step                            inner/step.py
    all rounds, and the exchanges that        rounds/rounds.py
    end a run (flush)
    gradients averaged at every step          rounds/data_parallel.py
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dilocox_jax.reference.exchanges import Arrays, Mean, zeros_like
from dilocox_jax.reference.fragments import names_by_fragment

# Function (parameters, batch) -> (loss, gradients).
LossAndGradient = Callable[[Arrays, Any], tuple[float, Arrays]]


@dataclasses.dataclass
class Result:
  """Parameters and losses of a run.

  Attributes:
    theta: Outer parameters at the end; for the rule "eager" a list with a tree
      for each replica.
    params: Parameters of each replica at the end.
    losses: Loss of each replica on its batch, before each step, [M, num_steps].
    snapshots: `theta` after every whole round. With `train_on_mean_gradient`,
      after every step.
  """

  theta: Any
  params: list[Arrays]
  losses: np.ndarray
  snapshots: list


def train(
  loss_and_gradient: LossAndGradient,
  params: Arrays,
  batches: Sequence[Sequence[Any]],
  *,
  inner: Any,
  outer: Any,
  sync_interval: int,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
  overlap_steps: int = 0,
  rule: str = "reset",
  mixing_alpha: float = 0.0,
  fragments: int | Sequence[Sequence[str]] = 1,
  fragment_order: str = "strided",
  exchange: Any = None,
  keep_unsent: bool = False,
  flush: bool = True,
) -> Result:
  """Trains M replicas that exchange pseudo-gradients.

  Args:
    loss_and_gradient: Function (params, batch) -> (loss, gradients).
    params: First parameters of every replica, and first theta.
    batches: Batches by replica and step, [M][num_steps].
    inner: Optimizer of the replicas (`reference.optimizers`). Each replica gets
      a copy.
    outer: Optimizer of theta. Each fragment gets a copy; under "eager", each
      fragment of each replica.
    sync_interval: H, inner steps between two sends of a fragment.
    first_interval: Length of the first rounds.
    steps_per_doubling: Inner steps after which the length of a round doubles.
      If this or `first_interval` is None, all rounds have H steps.
    overlap_steps: tau, inner steps between a send and its apply. The rule
      "eager" does not read it: its results are always one round old.
    rule: "reset", "continue", "mix" or "eager" (`Fragment.rejoin`).
    mixing_alpha: Weight of the replica's own value under "mix".
    fragments: Names of the leaves of each fragment; or P, to divide the leaves
      by `names_by_fragment`.
    fragment_order: "strided" or "sequential", for `names_by_fragment`.
    exchange: Averages a fragment (`reference.exchanges`). Each fragment gets a
      copy. None: the plain mean.
    keep_unsent: Whether the part of a pseudo-gradient that a lossy exchange did
      not send stays in the replica's parameters, and so in the next
      measurement. It needs the rule "continue", or "reset" with tau = 0.
    flush: Whether the exchanges in flight, and the progress since the last
      send, are applied at the end of the run. If not, theta lacks them.
  """
  assert rule in ("reset", "continue", "mix", "eager"), rule
  num_replicas = len(batches)
  num_steps = len(batches[0])
  replicas = [dict(params) for _ in range(num_replicas)]
  inner_optimizers = [copy.deepcopy(inner) for _ in range(num_replicas)]
  names_of_fragments: Sequence[Sequence[str]]
  if isinstance(fragments, int):
    names_of_fragments = names_by_fragment(params, fragments, fragment_order)
  else:
    names_of_fragments = fragments
  rounds = rounds_of(
    num_steps, sync_interval, first_interval, steps_per_doubling
  )
  round_ends = [start + length for start, length in rounds]
  fragment_class = EagerFragment if rule == "eager" else Fragment
  parts = [
    fragment_class(
      replicas=replicas,
      names=list(names),
      theta={name: params[name] for name in names},
      delays=delays_of(
        rounds, number, len(names_of_fragments), overlap_steps, sync_interval
      ),
      sync_interval=sync_interval,
      overlap_steps=overlap_steps,
      rule=rule,
      mixing_alpha=mixing_alpha,
      keep_unsent=keep_unsent,
      outer=copy.deepcopy(outer),
      exchange=copy.deepcopy(exchange) if exchange else Mean(),
    )
    for number, names in enumerate(names_of_fragments)
  ]
  losses = np.zeros([num_replicas, num_steps])
  snapshots = []
  for step in range(1, num_steps + 1):
    for m, w in enumerate(replicas):
      losses[m, step - 1], gradient = loss_and_gradient(w, batches[m][step - 1])
      w.update(inner_optimizers[m].step(w, gradient))
    for part in parts:
      part.run_events(step)
    if step in round_ends:
      snapshots.append(_whole_theta(parts, params, rule))
  if flush:
    for part in parts:
      part.flush(num_steps)
  theta = _whole_theta(parts, params, rule)
  return Result(theta, replicas, losses, snapshots)


def rounds_of(
  num_steps: int,
  sync_interval: int,
  first_interval: int | None = None,
  steps_per_doubling: int | None = None,
) -> list[tuple[int, int]]:
  """Returns where each round of a run starts, and its length.

  A round that begins after s inner steps has first_interval 2^k steps, with k =
  floor(s / steps_per_doubling), but at most H steps. The fast code is in
  plan/schedule/growing_schedule.py.

  Args:
    num_steps: Inner steps of the run.
    sync_interval: H.
    first_interval: Length of the first rounds.
    steps_per_doubling: Inner steps after which the length doubles. If this or
      `first_interval` is None, all rounds have H steps.

  Returns:
    Pairs (steps before the round, its length). The last pair begins at or after
    the end of the run.
  """
  rounds = []
  start = 0
  while True:
    length = sync_interval
    if first_interval and steps_per_doubling:
      grown = first_interval * 2 ** (start // steps_per_doubling)
      length = min(grown, sync_interval)
    rounds.append((start, length))
    if start >= num_steps:
      return rounds
    start += length


def delays_of(
  rounds: Sequence[tuple[int, int]],
  number: int,
  num_fragments: int,
  overlap_steps: int,
  sync_interval: int,
) -> dict[int, int]:
  """Returns when a fragment is sent, and how late each result is.

  Fragment p is sent after t > 0 inner steps if (t - t_p) mod H = 0 with t_p =
  floor(p H / P), and its average is applied tau steps later. In a shorter round
  of h steps, h replaces H, and tau h / H (rounded down, but at least 1)
  replaces tau. With tau = 0 the average is always applied at once.

  Source: Streaming DiLoCo, arXiv 2501.18512, Algorithm 2; the shorter rounds
  are ours. The fast code is in plan/schedule/sync_schedule.py.

  Args:
    rounds: Rounds of the run (`rounds_of`).
    number: Number of the fragment, p.
    num_fragments: P.
    overlap_steps: tau.
    sync_interval: H.

  Returns:
    Inner steps from a send to its apply, by the inner step of the send.
  """
  delays = {}
  for start, length in rounds:
    send_step = start + number * length // num_fragments
    delay = overlap_steps * length // sync_interval
    if overlap_steps:
      delay = max(delay, 1)
    # Fragment 0 is sent where a round begins, but not before the first one.
    if send_step > 0:
      delays[send_step] = delay
  return delays


@dataclasses.dataclass
class Fragment:
  """One fragment under the rules "reset", "continue" and "mix".

  A fragment is a part of the parameters. A rule says with which parameters a
  replica goes on when a mean arrives. A fragment is *sent* when its
  pseudo-gradient is measured for an exchange.

  Attributes:
    replicas: Parameters of each replica. A fragment changes only the leaves of
      `names`.
    names: Names of the fragment's leaves.
    theta: Outer parameters of the fragment.
    delays: For each step after which the fragment is sent, the number of inner
      steps until the mean is applied.
    sync_interval: H.
    overlap_steps: tau, the delay in rounds of H inner steps.
    rule: "reset", "continue" or "mix".
    mixing_alpha: Weight of the replica's own value under "mix".
    keep_unsent: Whether the part of a pseudo-gradient that a lossy exchange did
      not send stays in the replica's parameters.
    outer: Optimizer of theta.
    exchange: Averages pseudo-gradients over replicas.
    in_flight: Pseudo-gradients whose mean is not applied yet, the oldest first:
      pairs (step at which they were sent, pseudo-gradient of each replica).
    last_send: Step at which the fragment was last sent; 0 before the first
      time.
  """

  replicas: list[Arrays]
  names: list[str]
  theta: Any
  delays: dict[int, int]
  sync_interval: int
  overlap_steps: int
  rule: str
  mixing_alpha: float
  keep_unsent: bool
  outer: Any
  exchange: Any
  in_flight: list = dataclasses.field(default_factory=list)
  last_send: int = 0

  def run_events(self, step: int) -> None:
    """Does what is due after `step`: measures, then applies an older mean.

    The measured pseudo-gradients are then in flight, or with tau = 0 averaged
    and applied at once.
    """
    measured = self.measure() if step in self.delays else None
    if self.in_flight:
      send_step, oldest = self.in_flight[0]
      if send_step + self.delays[send_step] == step:
        self.in_flight.pop(0)
        self.apply(oldest)
    if measured is not None:
      self.last_send = step
      if self.overlap_steps == 0:
        self.apply(measured)
      else:
        self.in_flight.append((step, measured))

  def _pseudo_gradient(self, theta: Arrays, w: Arrays) -> Arrays:
    """Returns the pseudo-gradient theta - w of a replica, for this fragment.

    DiLoCo (arXiv 2311.08105), Algorithm 1, line 12: Delta = theta - theta_m. An
    optimizer subtracts its gradient, so a step along Delta moves theta toward
    w.
    """
    return {name: theta[name] - w[name] for name in self.names}

  def measure(self) -> list[Arrays]:
    """Returns the pseudo-gradient of each replica.

    Under "continue" a replica's parameters still contain the progress that it
    has sent but whose result has not arrived. So its pseudo-gradients in flight
    are subtracted; otherwise they would be sent twice. The fast code is in
    outer/rules.py.
    """
    deltas = [self._pseudo_gradient(self.theta, w) for w in self.replicas]
    if self.rule == "continue":
      for _, sent in self.in_flight:
        for delta, sent_delta in zip(deltas, sent, strict=True):
          for name in self.names:
            delta[name] = delta[name] - sent_delta[name]
    return deltas

  def apply(self, deltas: list[Arrays]) -> None:
    """Averages pseudo-gradients, and takes the outer step and the apply rule.

    DiLoCo, Algorithm 1: Delta = mean over m of Delta_m, then theta =
    OuterOpt(theta, Delta). In DiLoCoX (arXiv 2506.21263), Algorithm 2, the
    average contains a codec and error feedback. The fast code is in
    outer/outer_step.py.

    Args:
      deltas: Pseudo-gradient of each replica, as it was measured.
    """
    old = self.theta
    mean, received = self.exchange.average(deltas)
    new = self.outer.step(old, mean)
    self.theta = new
    for m, w in enumerate(self.replicas):
      for name in self.names:
        delta = deltas[m][name]
        w[name] = self.rejoin(w[name], old[name], new[name], delta)
        if self.keep_unsent:
          w[name] = w[name] - (delta - received[m][name])

  def rejoin(
    self, w: np.ndarray, old: np.ndarray, new: np.ndarray, delta: np.ndarray
  ) -> np.ndarray:
    """Returns the values of one leaf from which a replica goes on.

    "reset" is DiLoCo's line theta_m = theta. "mix" is Streaming DiLoCo's
    theta_m = alpha theta_m + (1 - alpha) theta. "continue" is the merge of
    LOSCAR-SGD (arXiv 2605.20866, recalled): the replica moves as theta has
    moved, and adds its own delta again, because the move of theta contains it.
    The text of DiLoCoX can be read as "reset" or as "continue". The fast code
    is in outer/rules.py.

    Example for "continue": theta was 10 and the replica was at 7 when its delta
    = 10 - 7 = 3 was measured. Now theta moves to 8, and the replica is at 6. It
    goes on from 6 + (8 - 10) + 3 = 7, which is the new theta plus the replica's
    progress of -1 since the send. With tau = 0 there is no such progress, and
    "continue" equals "reset".

    Args:
      w: The replica's values before.
      old: Outer values before the outer step.
      new: Outer values after the outer step.
      delta: Pseudo-gradient that the replica had measured.
    """
    if self.rule == "mix":
      return self.mixing_alpha * w + (1 - self.mixing_alpha) * new
    if self.rule == "continue" and self.overlap_steps:
      return w + (new - old) + delta
    return new

  def flush(self, step: int) -> None:
    """Ends a run after `step`: applies all progress, and replicas take theta.

    The pseudo-gradients in flight are applied first, the oldest first, and then
    the progress since the last send. With tau < H this progress is measured
    after the other applies. With tau >= H it is measured before them, as the
    next send of a longer run would be. The fast code is in rounds/rounds.py.
    """
    has_unsent = step > self.last_send
    measures_first = self.overlap_steps >= self.sync_interval
    unsent = self.measure() if has_unsent and measures_first else None
    while self.in_flight:
      _, oldest = self.in_flight.pop(0)
      self.apply(oldest)
    if has_unsent:
      self.apply(self.measure() if unsent is None else unsent)
    for w in self.replicas:
      w.update({name: self.theta[name] for name in self.names})

  def thetas(self) -> list[Arrays]:
    """Returns the fragment's outer parameters once for each replica."""
    return [self.theta for _ in self.replicas]


@dataclasses.dataclass
class EagerFragment(Fragment):
  """One fragment under the rule "eager".

  Each replica has its own theta and its own outer optimizer. At the end of
  round t, replica m of M has its pseudo-gradient d_m(t), and the mean of the
  pseudo-gradients of round t - 1. Its outer optimizer gets the gradient

    g_m = mean over k of d_k(t - 1) + (d_m(t) - d_m(t - 1)) / M

  This is the mean of the round before, in which the newest pseudo-gradient of
  the replica has replaced its old one. Before the first round all d are zero.

  Source: Kale et al., 2025, arXiv 2502.12996. The fast code is in
  outer/rules.py.

  Attributes:
    previous: d_k(t - 1), the pseudo-gradient of the round before, of each
      replica.
    has_sent: Whether a round has ended before.
  """

  def __post_init__(self):
    """Copies theta and the outer optimizer for each replica."""
    self.theta = [dict(self.theta) for _ in self.replicas]
    self.outer = [copy.deepcopy(self.outer) for _ in self.replicas]
    self.previous = [zeros_like(theta) for theta in self.theta]
    self.has_sent = False

  def run_events(self, step: int) -> None:
    """If `step` ends a round, measures and takes the outer steps.

    The mean of an outer step is that of the round before (`apply`).
    """
    if step in self.delays:
      self.last_send = step
      self.apply(self.measure())

  def measure(self) -> list[Arrays]:
    """Returns the pseudo-gradient of each replica, from its own theta."""
    return [
      self._pseudo_gradient(theta, w)
      for theta, w in zip(self.theta, self.replicas, strict=True)
    ]

  def apply(self, deltas: list[Arrays]) -> None:
    """Averages the older pseudo-gradients, and takes each replica's outer step.

    The older pseudo-gradients are those of the round before.

    Args:
      deltas: d_m(t), the newest pseudo-gradient, of each replica.
    """
    mean = zeros_like(deltas[0])
    if self.has_sent:
      mean, _ = self.exchange.average(self.previous)
    for m, w in enumerate(self.replicas):
      gradient = {
        name: mean[name]
        + (deltas[m][name] - self.previous[m][name]) / len(self.replicas)
        for name in self.names
      }
      self.theta[m] = self.outer[m].step(self.theta[m], gradient)
      w.update(self.theta[m])
    self.previous = deltas
    self.has_sent = True

  def flush(self, step: int) -> None:
    """Applies the progress since the last send, and the mean still to come.

    The mean of the last pseudo-gradients would be applied a round later. So one
    more apply follows, with zeros as the new progress.
    """
    if step > self.last_send:
      self.apply(self.measure())
    self.apply([zeros_like(theta) for theta in self.theta])

  def thetas(self) -> list[Arrays]:
    """Returns the fragment's outer parameters of each replica."""
    return self.theta


def _whole_theta(
  parts: Sequence[Fragment], params: Arrays, rule: str
) -> Arrays | list[Arrays]:
  """Returns the outer parameters of all fragments together.

  They are one tree, or under "eager" a list with a tree for each replica.
  """
  thetas = []
  for m in range(len(parts[0].replicas)):
    leaves: Arrays = {}
    for part in parts:
      leaves |= part.thetas()[m]
    thetas.append({name: leaves[name] for name in params})
  return thetas if rule == "eager" else thetas[0]


def train_on_mean_gradient(
  loss_and_gradient: LossAndGradient,
  params: Arrays,
  batches: Sequence[Sequence[Any]],
  *,
  inner: Any,
  exchange: Any = None,
) -> Result:
  """Trains replicas that average their gradients at every step (AllReduce).

  With a lossy exchange and error feedback this method is CocktailSGD (ICML
  2023). The fast code is in rounds/data_parallel.py.

  Args:
    loss_and_gradient: Function (params, batch) -> (loss, gradients).
    params: First parameters.
    batches: Batches by replica and step, [M][num_steps].
    inner: Optimizer (`reference.optimizers`), whose state changes in place.
    exchange: Averages gradients (`reference.exchanges`). Its state changes in
      place, too. None: the plain mean.

  Returns:
    The run. All replicas have the same parameters, so `theta` and each tree of
    `params` have the same values.
  """
  exchange = exchange or Mean()
  params = dict(params)
  snapshots = []
  losses = np.zeros([len(batches), len(batches[0])])
  for step in range(len(batches[0])):
    gradients = []
    for m, replica_batches in enumerate(batches):
      losses[m, step], gradient = loss_and_gradient(
        params, replica_batches[step]
      )
      gradients.append(gradient)
    mean, _ = exchange.average(gradients)
    params = inner.step(params, mean)
    snapshots.append(params)
  replicas = [dict(params) for _ in batches]
  return Result(params, replicas, losses, snapshots)
