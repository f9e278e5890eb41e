"""A least-squares problem on which the replicas disagree.

Replica m minimizes 0.5 ||A_m x - y_m||^2 / n over the vector x of all leaves.
Each replica has its own solution and its own curvature, so that an average of
replicas is not what any of them would have reached alone, and a term that is
dropped or counted twice shows.

Below, the reference trains on it: there the stacked blocks are taken apart into
one leaf a layer.
"""

import copy

import numpy as np

from dilocox_jax.reference import fragments, methods
from dilocox_jax.trees import leaves_by_path, nested
from tests.oracles import slices


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


def split(params):
  """Turns the tree into a flat dict with one entry a layer and leaf."""
  leaves = {"embed": params["embed"], "head": params["head"]}
  for name, stacked in params["blocks"].items():
    for layer in range(len(stacked)):
      leaves[f"blocks/{name}/{layer}"] = stacked[layer : layer + 1]
  return leaves


def join(leaves):
  """Undoes `split`."""
  layers = range(sum(name.startswith("blocks/w/") for name in leaves))
  blocks = {
    name: np.concatenate([leaves[f"blocks/{name}/{layer}"] for layer in layers])
    for name in ("w", "b")
  }
  return {"blocks": blocks, "embed": leaves["embed"], "head": leaves["head"]}


def fragment_names(params, num_fragments, order):
  """The names, as in `split`, of the leaves of each fragment."""
  return fragments.names_by_fragment(split(params), num_fragments, order)


def split_loss_and_grad(leaves, batch):
  """The loss and the gradients of split parameters."""
  loss, grads = loss_and_grad(join(leaves), *batch)
  return loss, split(grads)


def whole_loss_and_grad(leaves, batch):
  """The same of leaves by path, whose layers stay stacked."""
  loss, grads = loss_and_grad(nested(leaves), *batch)
  return loss, leaves_by_path(grads)


def arguments(params0, A, y, num_steps):
  """What the reference's methods are given first."""
  batches = [
    list(zip(*own, strict=True))[:num_steps] for own in zip(A, y, strict=True)
  ]
  return split_loss_and_grad, split(params0), batches


def joined(run, join=join):
  """A result of the reference with joined trees."""

  def whole(theta):
    return list(map(whole, theta)) if isinstance(theta, list) else join(theta)

  each = run.theta, run.params, run.snapshots
  theta, params, snapshots = map(whole, each)
  return methods.Result(theta, params, run.losses, snapshots)  # pyright: ignore


def train(params0, A, y, *, num_fragments, fragment_order, num_steps, **rest):
  """Trains by the reference's `train`."""
  given = arguments(params0, A, y, num_steps)
  if fragment_order in ("sliced", "interleaved"):
    rest |= {"num_fragments": num_fragments, "fragment_order": fragment_order}
    whole = whole_loss_and_grad, leaves_by_path(params0), given[2]
    return joined(slices.train_slices(*whole, **rest), nested)
  names = fragment_names(params0, num_fragments, fragment_order)
  return joined(methods.train(*given, fragments=names, **rest))


def allreduce(params0, A, y, *, inner, num_steps):
  """Trains on the mean gradient; `inner` is left as it is."""
  given = arguments(params0, A, y, num_steps)
  inner = copy.deepcopy(inner)
  return joined(methods.train_on_mean_gradient(*given, inner=inner))


def warm_start(params0, A, y, *, inner, num_steps):
  """Parameters and inner optimizer after the first steps of a run.

  Args:
    params0: where to start.
    A: inputs [M, steps, n, dim]; only the first num_steps are used.
    y: targets [M, steps, n].
    inner: optimizer, left as it is.
    num_steps: steps of the warm start, may be 0.
  """
  inner = copy.deepcopy(inner)
  given = arguments(params0, A, y, num_steps)
  run = methods.train_on_mean_gradient(*given, inner=inner)
  return join(run.theta), inner
