"""Trains M replicas that exchange pseudo-gradients, by any rule.

After each inner step, every fragment looks whether something of its own falls
on this step. It changes none but its own leaves of the replicas' parameters.
"""

import copy
import dataclasses

import numpy as np

from . import eager, fragments, least_squares, rules


@dataclasses.dataclass
class Result:
  """What a run leaves behind."""

  theta: dict | list  # for `eager` a list, one tree a replica
  params: list  # one tree a replica
  losses: np.ndarray  # [M, steps], each before its own step
  snapshots: list  # theta after every sync_interval steps


def simulate(
  params0,
  A,
  y,
  *,
  sync_interval,
  num_fragments,
  fragment_order,
  overlap_steps,
  rule,
  mixing_alpha,
  inner,
  outer,
  num_steps,
  flush=True,
):
  """Runs num_steps inner steps on every replica.

  Args:
    params0: where every replica and theta start.
    A: inputs [M, steps, n, dim].
    y: targets [M, steps, n].
    sync_interval: inner steps between two sends of a fragment.
    num_fragments: number of fragments.
    fragment_order: "sequential" or "strided".
    overlap_steps: inner steps between a send and its apply.
    rule: "synchronous", "reset", "continue", "mix" or "eager".
    mixing_alpha: weight of the local value, for "mix" alone.
    inner: optimizer, copied with its state for every replica.
    outer: optimizer, copied for every fragment (and replica, for "eager").
    num_steps: inner steps.
    flush: whether everything pending and unsent is brought in at the end.
  """
  settings = rules.Settings(
    rule, sync_interval, overlap_steps, mixing_alpha, outer
  )
  Fragment = eager.PerReplica if rule == "eager" else rules.Shared
  w = [fragments.split(params0) for _ in A]
  inners = [copy.deepcopy(inner) for _ in A]
  parts = []
  for p in range(num_fragments):
    names = fragments.names_of(p, params0, num_fragments, fragment_order)
    start = p * sync_interval // num_fragments
    leaves0 = fragments.split(params0)
    parts.append(Fragment(settings, names, start, w, leaves0))
  losses = np.zeros([len(A), num_steps])
  snapshots = []
  for step in range(1, num_steps + 1):
    for m in range(len(A)):
      loss, grads = least_squares.loss_and_grad(
        fragments.join(w[m]), A[m][step - 1], y[m][step - 1]
      )
      losses[m, step - 1] = loss
      w[m].update(inners[m].step(w[m], fragments.split(grads)))
    for part in parts:
      part.events(step)
    if step % sync_interval == 0:
      snapshots.append(gather(parts, len(A), rule))
  if flush:
    for part in parts:
      part.flush(num_steps)
  params = [fragments.join(w_m) for w_m in w]
  return Result(gather(parts, len(A), rule), params, losses, snapshots)


def gather(parts, num_replicas, rule):
  """Theta as one tree, or one a replica for `eager`."""
  thetas = []
  for m in range(num_replicas):
    leaves = {}
    for part in parts:
      leaves.update(part.thetas()[m])
    thetas.append(fragments.join(leaves))
  return thetas if rule == "eager" else thetas[0]
