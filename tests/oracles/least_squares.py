"""A least-squares problem on which the replicas disagree.

Replica m minimises 0.5 ||A_m x - y_m||^2 / n over the vector x of all leaves.
Each replica has its own solution and its own curvature, so that an average of
replicas is not what any of them would have reached alone, and a term that is
dropped or counted twice shows.
"""

import numpy as np


def make_problem(seed, num_replicas, num_steps, num_layers, width, batch):
  """Draws a start and a batch for every replica and inner step.

  Returns:
    params0: tree of float64 leaves.
    A: inputs [num_replicas, num_steps, batch, dim].
    y: targets [num_replicas, num_steps, batch].
  """
  rng = np.random.default_rng(seed)
  params0 = {
    "blocks": {
      "w": rng.normal(size=[num_layers, width]),
      "b": rng.normal(size=[num_layers]),
    },
    "embed": rng.normal(size=[width]),
    "head": rng.normal(size=[width]),
  }
  dim = len(to_vector(params0))
  common = rng.normal(size=[dim])
  A = np.zeros([num_replicas, num_steps, batch, dim])
  y = np.zeros([num_replicas, num_steps, batch])
  for m in range(num_replicas):
    solution = common + 0.5 * rng.normal(size=[dim])
    scale = rng.uniform(0.5, 1.5, size=[dim])
    for step in range(num_steps):
      A[m, step] = rng.normal(size=[batch, dim]) * scale
      noise = 0.1 * rng.normal(size=[batch])
      y[m, step] = A[m, step] @ solution + noise
  return params0, A, y


def to_vector(params):
  """Lays all leaves end to end: embed, blocks/w, blocks/b, head."""
  return np.concatenate(
    [
      params["embed"],
      params["blocks"]["w"].reshape(-1),
      params["blocks"]["b"],
      params["head"],
    ]
  )


def from_vector(x, like):
  """Takes the vector x [dim] apart into the shapes of the tree `like`."""
  num_layers, width = like["blocks"]["w"].shape
  b_start = width + num_layers * width
  head_start = b_start + num_layers
  return {
    "blocks": {
      "w": x[width:b_start].reshape(num_layers, width),
      "b": x[b_start:head_start],
    },
    "embed": x[:width],
    "head": x[head_start:],
  }


def loss_and_grad(params, A, y):
  """Loss and gradient of one batch.

  Args:
    params: tree of leaves.
    A: inputs [n, dim].
    y: targets [n].

  Returns:
    The loss, and a tree of gradients like params.
  """
  error = A @ to_vector(params) - y
  loss = 0.5 * np.sum(error**2) / len(y)
  grad = A.T @ error / len(y)
  return loss, from_vector(grad, params)
