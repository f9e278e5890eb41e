"""Optimizers with optax's arithmetic, each holding the state of one tree.

The same optimizer serves inside (its gradient is the loss's) and outside (its
gradient is the averaged pseudo-gradient). State starts at zero on the first
step. `copy.deepcopy` copies an optimizer with its state. The fast code takes
optax's: dilocox_jax/optimizers.py.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from dilocox_jax.reference.exchanges import Arrays

# A number, or a function of the number of steps taken before.
LearningRate = float | Callable[[int], float]


def rate_at(learning_rate: LearningRate, count: int) -> float:
  """The learning rate of the step that `count` steps came before.

  Args:
    learning_rate: The rate, or a function from a count of steps to it.
    count: Steps taken.
  """
  return learning_rate(count) if callable(learning_rate) else learning_rate


@dataclasses.dataclass
class Sgd:
  """Gradient descent: plain, with momentum, or with Nesterov's.

  m <- g + mu m, then x <- x - lr m, or with Nesterov x <- x - lr (g + mu m).
  This is `optax.sgd`.

  Attributes:
    learning_rate: lr.
    momentum: mu; None is none.
    nesterov: Whether the step looks ahead, as the papers' outer step does.
    count: Steps taken.
    trace: m of every leaf.
  """

  learning_rate: LearningRate
  momentum: float | None = None
  nesterov: bool = False
  count: int = 0
  trace: dict[str, Any] = dataclasses.field(default_factory=dict)

  def step(self, params: Arrays, grads: Arrays) -> Arrays:
    """Returns the parameters after one step.

    Args:
      params: Parameters before the step, by name.
      grads: Their gradients, by name, with the same shapes.
    """
    lr = rate_at(self.learning_rate, self.count)
    self.count += 1
    return {name: params[name] - lr * self._move(name, grads) for name in grads}

  def _move(self, name: str, grads: Arrays):
    g = grads[name]
    mu = self.momentum
    if mu is None:
      return g
    self.trace[name] = g + mu * self.trace.get(name, np.zeros_like(g))
    return g + mu * self.trace[name] if self.nesterov else self.trace[name]


@dataclasses.dataclass
class AdamW:
  """Adam with weight decay that is decoupled and scaled by the learning rate.

  m <- b1 m + (1 - b1) g and v <- b2 v + (1 - b2) g^2, both divided by what
  their weights add up to, 1 - b^t (`_mean` for m); then
  x <- x - lr (m / (sqrt(v) + eps) + decay x). This is `optax.adamw`.

  Source: Loshchilov and Hutter, 2017, arXiv 1711.05101, Algorithm 2.

  Attributes:
    learning_rate: lr.
    b1: Decay of the mean.
    b2: Decay of the mean square.
    eps: Added to the root.
    weight_decay: Share of x, times lr, that a step takes away.
    nesterov: Whether the mean looks ahead.
    count: Steps taken, t.
    mean: m of every leaf.
    square: v of every leaf.
  """

  learning_rate: LearningRate
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 1e-4
  nesterov: bool = False
  count: int = 0
  mean: dict[str, Any] = dataclasses.field(default_factory=dict)
  square: dict[str, Any] = dataclasses.field(default_factory=dict)

  def step(self, params: Arrays, grads: Arrays) -> Arrays:
    """Returns the parameters after one step.

    Args:
      params: Parameters before the step, by name.
      grads: Their gradients, by name, with the same shapes.
    """
    lr = rate_at(self.learning_rate, self.count)
    self.count += 1
    return {
      name: params[name]
      - lr * (self._move(name, grads[name]) + self.weight_decay * params[name])
      for name in grads
    }

  def _move(self, name: str, g: np.ndarray):
    m = self.mean.get(name, np.zeros_like(g))
    v = self.square.get(name, np.zeros_like(g))
    self.mean[name] = m = self.b1 * m + (1 - self.b1) * g
    self.square[name] = v = self.b2 * v + (1 - self.b2) * g**2
    m = _mean(m, g, self.b1, self.count, self.nesterov)
    v = v / (1 - self.b2**self.count)
    return m / (np.sqrt(v) + self.eps)


def _mean(
  m: np.ndarray, g: np.ndarray, b: float, t: int, nesterov: bool
) -> np.ndarray:
  """The mean of t gradients, the last of them g, whose decaying sum is m.

  Nesterov's looks one step ahead: to b m it adds g with the weight that the
  next gradient would have, and each part is divided by its own weights' sum.
  """
  if not nesterov:
    return m / (1 - b**t)
  return b * m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)


@dataclasses.dataclass
class Muon:
  """Nesterov's momentum, made orthogonal; AdamW for what is no matrix.

  m <- b m + (1 - b) g; n is the mean that looks ahead (`_mean`); then
  x <- x - lr (0.2 sqrt(max(rows, columns)) orthogonal(n) + decay x). An
  orthogonal matrix has entries of mean square 1 / max(rows, columns), so every
  step has the size 0.2 lr, which is that of AdamW's. Stacked matrices
  [layers, rows, columns] are matrices of their own.

  Source: Jordan et al., 2024, "Muon"; the size: Liu et al., 2025, arXiv
  2502.16982, section 2.2. The fast code: `inner_optimizer` in
  dilocox_jax/optimizers.py.

  Attributes:
    learning_rate: lr, AdamW's as well.
    matrices: Names of the leaves that are made orthogonal: those of the blocks,
      and not embedding, head and norms.
    rest: Steps on all other leaves.
    momentum: b.
    weight_decay: Share of x, times lr, that a step takes away.
    count: Steps taken, t.
    mean: m of every matrix.
  """

  learning_rate: LearningRate
  matrices: Collection[str]
  rest: AdamW
  momentum: float = 0.95
  weight_decay: float = 0.0
  count: int = 0
  mean: dict[str, Any] = dataclasses.field(default_factory=dict)

  def step(self, params: Arrays, grads: Arrays) -> Arrays:
    """Returns the parameters after one step.

    Args:
      params: Parameters before the step, by name.
      grads: Their gradients, by name, with the same shapes.
    """
    lr = rate_at(self.learning_rate, self.count)
    self.count += 1
    others = {name: g for name, g in grads.items() if name not in self.matrices}
    new = {
      name: params[name]
      - lr * (self._move(name, grads[name]) + self.weight_decay * params[name])
      for name in self.matrices
    }
    return new | self.rest.step(params, others)

  def _move(self, name: str, g: np.ndarray) -> np.ndarray:
    old = self.mean.get(name, np.zeros_like(g))
    self.mean[name] = m = self.momentum * old + (1 - self.momentum) * g
    n = _mean(m, g, self.momentum, self.count, nesterov=True)
    return 0.2 * np.sqrt(max(g.shape[-2:])) * orthogonal(n)


def orthogonal(matrix: np.ndarray) -> np.ndarray:
  """Brings the singular values of a matrix [..., rows, columns] close to 1.

  Five steps of Newton-Schulz, X <- a X + b (X X^T) X + c (X X^T)^2 X, which
  take each singular value s to a s + b s^3 + c s^5. They begin with the matrix
  divided by its norm, so that none is above 1, and end between 0.7 and 1.2.

  Source: Jordan et al., 2024, "Muon", with its a, b and c.
  """
  x = matrix / (np.linalg.norm(matrix, axis=(-2, -1), keepdims=True) + 1e-8)
  for _ in range(5):
    square = x @ np.swapaxes(x, -2, -1)
    x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
  return x


def polynomial_average(iterates: Sequence[Arrays], power: float) -> Arrays:
  """Returns the average of x_1 ... x_t with about s^power as the weight of x_s.

  The weights are s (s + 1) ... (s + power - 1). For power = 2 and t = 3 they
  are 2, 6 and 12, divided by their sum. A power that is no whole number
  continues the product, as the gamma function does. Fast: outer/average.py.

  Source: Shamir and Zhang, 2013, arXiv 1212.1824, section 4.

  Args:
    iterates: x_1 ... x_t, each by name.
    power: Power of s in the weights.
  """
  weights = [1.0]
  for s in range(1, len(iterates)):
    weights.append(weights[-1] * (s + power) / s)
  shares = np.array(weights) / sum(weights)
  return {
    name: np.tensordot(shares, np.stack([x[name] for x in iterates]), axes=1)
    for name in iterates[0]
  }
