"""Plain data parallel, and the warm start that may precede any method.

The replicas' gradients are averaged at every step and one optimizer steps on
the mean. No difference of parameters is ever taken.
"""

import copy

import numpy as np

from . import fragments, least_squares, rules, sync


def simulate(params0, A, y, *, inner, num_steps):
  """Trains on the mean gradient; theta is snapped after every step."""
  params, losses, snapshots, _ = _train(params0, A, y, inner, num_steps)
  copies = [copy.deepcopy(params) for _ in A]
  return sync.Result(params, copies, losses, snapshots)


def warm_start(params0, A, y, *, inner, num_steps, on="all"):
  """The first steps of a run, whose result every replica starts from.

  Args:
    params0: where to start.
    A: inputs [M, steps, n, dim]; only the first num_steps are used.
    y: targets [M, steps, n].
    inner: optimizer, left as it is.
    num_steps: steps of the warm start, may be 0.
    on: "all" replicas as data parallel, or "first" for replica 0 alone.

  Returns:
    Parameters and optimizer to pass as `params0` and `inner` to
    `sync.simulate`, which copies both for every replica, with A[:, num_steps:]
    and y[:, num_steps:].
  """
  assert on in ("all", "first"), on
  count = len(A) if on == "all" else 1
  params, _, _, warm = _train(params0, A[:count], y[:count], inner, num_steps)
  return params, warm


def _train(params0, A, y, inner, num_steps):
  params = fragments.split(params0)
  optimizer = copy.deepcopy(inner)
  losses = np.zeros([len(A), num_steps])
  snapshots = []
  for step in range(num_steps):
    grads = []
    for m in range(len(A)):
      loss, grad = least_squares.loss_and_grad(
        fragments.join(params), A[m][step], y[m][step]
      )
      losses[m, step] = loss
      grads.append(fragments.split(grad))
    params = optimizer.step(params, rules.mean(grads))
    snapshots.append(fragments.join(params))
  return fragments.join(params), losses, snapshots, optimizer
