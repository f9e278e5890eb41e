"""The methods of this project, step by step, as the papers print them.

A tree of parameters is a flat dict of arrays. M replicas train on their own
batches. The parameters are divided into P *fragments*, lists of names. Every
fragment has *outer parameters* theta, which all replicas share, and every H
inner steps its change is averaged:

    measure  Delta_m = theta - w_m                  (the pseudo-gradient)
    average  Delta   = mean over m of Delta_m       (the only communication)
    step     theta'  = Outer(theta, Delta)          (an optimizer, Delta its
                                                     gradient)
    rejoin   w_m     = theta'                       (the apply rule)

The methods differ in four places, all of them arguments of `train`:

    method              H     P  tau    rule        what is sent
    diloco              H     1  0      reset       Delta
    open_diloco         500   1  0      reset       Delta in fp16
    streaming_diloco    H     P  tau    mix         Delta in 4 bits (E3M0)
    eager               H     1  H      eager       Delta
    dilocox             H     1  H      reset or    Delta, low rank and 4 bits
                                        continue
    sparse_loco         H     1  0      reset       top-k of Delta in 2 bits
    muloco              H     1  0      reset       Delta in 2 bits, Muon inside
    overlap_loco        H     P  H / P  continue    Delta in 1 bit, Muon inside
    delayed             any   P  any    any         any

`allreduce` averages gradients at every step instead (`train_on_mean_gradient`),
and so does `cocktail_sgd`, which sends them lossily. config/recipes.py has the
settings of the papers.

tau is the delay: what was measured after step s is applied after step s + tau,
and the transfer has tau steps of time. Fragment p is measured after the steps
s > 0 with (s - t_p) mod H = 0, where t_p = floor(p H / P) is its offset.
Example: H = 6, P = 3, tau = 2. Fragment 1 has offset 2; it is measured after
steps 2, 8, 14, ... and applied after steps 4, 10, 16, ...

The fast code does the same in these files:

    when a fragment is sent and applied       plan/schedule/sync_schedule.py
    the order of events on one step           outer/window.py
    measure and apply                         outer/outer_step.py
    the sign of Delta, and the apply rules    outer/rules.py
    the average                               aggregators/
    the inner step                            inner/step.py
    all rounds, and the flush                 rounds/rounds.py
    gradients averaged at every step          rounds/data_parallel.py
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dilocox_jax.reference.exchanges import Arrays, Mean, zeros_like
from dilocox_jax.reference.fragments import names_by_fragment

# From parameters and a batch to the loss and the gradients.
LossAndGradient = Callable[[Arrays, Any], tuple[float, Arrays]]


@dataclasses.dataclass
class Result:
  """What a run leaves behind.

  Attributes:
    theta: Outer parameters; for the rule "eager" one tree for each replica.
    params: Parameters of each replica.
    losses: Loss of each replica before each of its steps, [M, num_steps].
    snapshots: `theta` after every H steps.
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
    loss_and_gradient: The model and its loss.
    params: Where every replica and theta start.
    batches: Batches by replica and step.
    inner: Optimizer of the replicas (`reference.optimizers`); each replica
      gets a copy.
    outer: Optimizer of theta; each fragment gets a copy.
    sync_interval: H.
    overlap_steps: tau; "eager" is one round late whatever is given.
    rule: "reset", "continue", "mix" or "eager".
    mixing_alpha: Weight of the replica's own value, for "mix" only.
    fragments: Names of each fragment, or P, by which `names_by_fragment`
      divides the leaves.
    fragment_order: How it divides them: "strided" or "sequential";
      tests/oracles/slices.py has the others.
    exchange: Averages a fragment (`reference.exchanges`); each fragment gets a
      copy. None: the plain mean.
    keep_unsent: Whether a replica keeps what the exchange did not send of its
      own pseudo-gradient; for tau = 0 and "continue".
    flush: Whether everything pending and unsent is applied at the end.
  """
  assert rule in ("reset", "continue", "mix", "eager"), rule
  num_replicas = len(batches)
  num_steps = len(batches[0])
  replicas = [dict(params) for _ in range(num_replicas)]
  inner_optimizers = [copy.deepcopy(inner) for _ in range(num_replicas)]
  names = fragments
  if isinstance(names, int):
    names = names_by_fragment(params, names, fragment_order)
  kind = EagerFragment if rule == "eager" else Fragment
  parts = [
    kind(
      replicas=replicas,
      names=list(each),
      theta={name: params[name] for name in each},
      offset=number * sync_interval // len(names),
      sync_interval=sync_interval,
      overlap_steps=overlap_steps,
      rule=rule,
      mixing_alpha=mixing_alpha,
      keep_unsent=keep_unsent,
      outer=copy.deepcopy(outer),
      exchange=copy.deepcopy(exchange) if exchange else Mean(),
    )
    for number, each in enumerate(names)
  ]
  losses = np.zeros([num_replicas, num_steps])
  snapshots = []
  for step in range(1, num_steps + 1):
    for m, w in enumerate(replicas):
      losses[m, step - 1], gradient = loss_and_gradient(w, batches[m][step - 1])
      w.update(inner_optimizers[m].step(w, gradient))
    for part in parts:
      part.after(step)
    if step % sync_interval == 0:
      snapshots.append(_gathered(parts, params, rule))
  if flush:
    for part in parts:
      part.flush(num_steps)
  return Result(_gathered(parts, params, rule), replicas, losses, snapshots)


@dataclasses.dataclass
class Fragment:
  """One fragment under the rules reset, continue and mix.

  Attributes:
    replicas: Parameters of all replicas; this changes only `names` of them.
    names: Names of the fragment's leaves.
    theta: Outer parameters of the fragment.
    offset: t_p.
    sync_interval: H.
    overlap_steps: tau.
    rule: "reset", "continue" or "mix".
    mixing_alpha: Weight of the replica's own value under "mix".
    keep_unsent: Whether replicas keep what was not sent.
    outer: Optimizer of theta.
    exchange: Averages pseudo-gradients over replicas.
    in_flight: Pairs (step of the send, pseudo-gradients of all replicas),
      the oldest first.
    last_send: Step of the last send.
  """

  replicas: list[Arrays]
  names: list[str]
  theta: Any
  offset: int
  sync_interval: int
  overlap_steps: int
  rule: str
  mixing_alpha: float
  keep_unsent: bool
  outer: Any
  exchange: Any
  in_flight: list = dataclasses.field(default_factory=list)
  last_send: int = 0

  def after(self, step: int) -> None:
    """Runs what falls on this step: measure, then apply, then send.

    Streaming DiLoCo (arXiv 2501.18512), Algorithm 2: fragment p is sent when
    (t - t_p) mod H = 0, and its average is used tau steps later.
    Fast: plan/schedule/sync_schedule.py lists these events.
    """
    is_sent = (step - self.offset) % self.sync_interval == 0
    measured = self.measure() if is_sent else None
    if self.in_flight and self.in_flight[0][0] + self.overlap_steps == step:
      self.apply(self.in_flight.pop(0)[1])
    if measured is not None:
      self.last_send = step
      if self.overlap_steps == 0:
        self.apply(measured)
      else:
        self.in_flight.append((step, measured))

  def _ahead(self, theta: Arrays, w: Arrays) -> Arrays:
    """Outer minus inner parameters: a descent step on it moves theta to w.

    DiLoCo (arXiv 2311.08105), Algorithm 1, line 12: Delta = theta - theta_m.
    """
    return {name: theta[name] - w[name] for name in self.names}

  def measure(self) -> list[Arrays]:
    """The pseudo-gradient of every replica.

    Under "continue" a replica is ahead of theta by what it has sent and not
    yet got back, so that is left out: Delta = theta - (sent, unapplied) - w.
    Fast: outer/rules.py.
    """
    deltas = [self._ahead(self.theta, w) for w in self.replicas]
    if self.rule == "continue":
      for _, sent in self.in_flight:
        for delta, own in zip(deltas, sent, strict=True):
          for name in self.names:
            delta[name] = delta[name] - own[name]
    return deltas

  def apply(self, deltas: list[Arrays]) -> None:
    """Averages, takes the outer step, and lets the replicas rejoin.

    DiLoCo, Algorithm 1: Delta = mean over m of Delta_m, then
    theta = OuterOpt(theta, Delta). DiLoCoX (arXiv 2506.21263), Algorithm 2,
    has its codec and error feedback inside the average.
    Fast: outer/outer_step.py.
    """
    old = self.theta
    mean, sent = self.exchange.average(deltas)
    self.theta = new = self.outer.step(old, mean)
    for w, own, arrived in zip(self.replicas, deltas, sent, strict=True):
      for name in self.names:
        w[name] = self.rejoin(w[name], old[name], new[name], own[name])
        if self.keep_unsent:
          w[name] = w[name] - (own[name] - arrived[name])

  def rejoin(self, w, old, new, own):
    """Where a replica continues, one leaf.

    "reset" is DiLoCo's line theta_m = theta; "mix" is Streaming DiLoCo's
    theta_m = alpha theta_m + (1 - alpha) theta; "continue" is ours. Of DiLoCoX
    the text leaves open which of the first and the last it means.
    Fast: outer/rules.py.

    With tau = 0 "continue" has nothing to keep and equals "reset".
    Example for "continue": theta moved from 10 to 8, this replica had sent
    own = 3 and stands at 6, so it continues at 6 + (8 - 10) + 3 = 7.

    Args:
      w: The replica's own value.
      old: Outer value before the step.
      new: Outer value after it.
      own: Pseudo-gradient that the replica had measured.
    """
    if self.rule == "mix":
      return self.mixing_alpha * w + (1 - self.mixing_alpha) * new
    if self.rule == "continue" and self.overlap_steps:
      return w + (new - old) + own
    return new

  def flush(self, step: int) -> None:
    """Applies everything at the end: in flight first, then what is unsent.

    With tau >= H the next send would have come before those applies, so what
    is unsent is measured first. Ours: papers end on a whole round.
    Fast: rounds/rounds.py.
    """
    measures_first = self.overlap_steps >= self.sync_interval
    unsent = self.measure() if measures_first else None
    while self.in_flight:
      self.apply(self.in_flight.pop(0)[1])
    if step > self.last_send:
      self.apply(unsent if unsent is not None else self.measure())
    for w in self.replicas:
      w.update({name: self.theta[name] for name in self.names})

  def thetas(self) -> list[Arrays]:
    """The outer parameters as each replica has them."""
    return [self.theta for _ in self.replicas]


@dataclasses.dataclass
class EagerFragment(Fragment):
  """One fragment under the rule eager: theta and Outer for each replica.

  After every H steps replica m steps with the others' pseudo-gradients of the
  round before and its own of this one:

    g_m = mean over k of d_k(t - 1) + (d_m(t) - d_m(t - 1)) / M

  Source: Kale et al., 2025, arXiv 2502.12996. Before the first round all d
  are zero. Fast: outer/rules.py.
  """

  def __post_init__(self):
    self.theta = [dict(self.theta) for _ in self.replicas]
    self.outer = [copy.deepcopy(self.outer) for _ in self.replicas]
    self.before = [zeros_like(theta) for theta in self.theta]
    self.has_sent = False

  def after(self, step: int) -> None:
    """Measures and applies at the end of every round."""
    if (step - self.offset) % self.sync_interval == 0:
      self.last_send = step
      self.apply(self.measure())

  def measure(self) -> list[Arrays]:
    """The pseudo-gradient of every replica, from its own theta."""
    pairs = zip(self.theta, self.replicas, strict=True)
    return [self._ahead(theta, w) for theta, w in pairs]

  def apply(self, deltas: list[Arrays]) -> None:
    """Takes every replica's outer step; the exchange is a round old."""
    mean = zeros_like(deltas[0])
    if self.has_sent:
      mean, _ = self.exchange.average(self.before)
    for m, w in enumerate(self.replicas):
      gradient = {
        name: mean[name]
        + (deltas[m][name] - self.before[m][name]) / len(self.replicas)
        for name in self.names
      }
      self.theta[m] = self.outer[m].step(self.theta[m], gradient)
      w.update(self.theta[m])
    self.before = deltas
    self.has_sent = True

  def flush(self, step: int) -> None:
    """One eager apply of what is unsent, and one more so that it arrives."""
    zeros = [zeros_like(theta) for theta in self.theta]
    has_unsent = step > self.last_send
    self.apply(self.measure() if has_unsent else zeros)
    if has_unsent:
      self.apply(zeros)

  def thetas(self) -> list[Arrays]:
    """The outer parameters of each replica."""
    return self.theta


def _gathered(parts: Sequence[Fragment], params: Arrays, rule: str):
  """Theta as one tree, or as one for each replica under "eager"."""
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
  """AllReduce: the gradients are averaged at every step.

  With a lossy exchange and error feedback this is CocktailSGD (ICML 2023). It
  is also the warm start of DiLoCo. Fast: rounds/data_parallel.py.

  Args:
    loss_and_gradient: The model and its loss.
    params: Where training starts.
    batches: Batches by replica and step.
    inner: Optimizer; the one given is changed, so that training can go on.
    exchange: Averages gradients; None: the plain mean.
  """
  exchange = exchange or Mean()
  params = dict(params)
  snapshots = []
  losses = np.zeros([len(batches), len(batches[0])])
  for step in range(len(batches[0])):
    gradients = []
    for m, own in enumerate(batches):
      losses[m, step], gradient = loss_and_gradient(params, own[step])
      gradients.append(gradient)
    mean, _ = exchange.average(gradients)
    params = inner.step(params, mean)
    snapshots.append(params)
  copies = [dict(params) for _ in batches]
  return Result(params, copies, losses, snapshots)
