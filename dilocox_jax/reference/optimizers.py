"""SGD, AdamW and Muon in numpy, with the arithmetic of optax.

An optimizer holds the state for one tree of parameters. `copy.deepcopy` copies
the optimizer with this state. An inner optimizer gets the gradient of the loss,
and an outer optimizer gets the averaged pseudo-gradient in its place. The fast
code is dilocox_jax/optimizers.py.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from dilocox_jax.reference.exchanges import Arrays

# A number, or a function from the number of steps taken before to a number.
LearningRate = float | Callable[[int], float]


def rate_at(learning_rate: LearningRate, count: int) -> float:
  """Returns the learning rate of the next step, after `count` steps."""
  return learning_rate(count) if callable(learning_rate) else learning_rate


def warmup_cosine(
  peak: float, *, warmup_steps: int, total_steps: int, final_fraction: float
) -> Callable[[int], float]:
  """Returns a schedule: a function from the step to the learning rate.

  The schedule is a linear warm-up, then half a cosine. Steps count from 0. The
  warm-up starts with 0 and reaches `peak` after `warmup_steps` steps. At
  step `total_steps`, one after the last, the rate would be `peak` times
  `final_fraction`. The fast code is `learning_rate_schedule` in
  dilocox_jax/optimizers.py.
  """
  decay_steps = total_steps - warmup_steps

  def learning_rate(step: int) -> float:
    if step < warmup_steps:
      return peak * step / warmup_steps
    cosine = math.cos(math.pi * (step - warmup_steps) / decay_steps)
    return peak * (final_fraction + (1 - final_fraction) * (1 + cosine) / 2)

  return learning_rate


@dataclasses.dataclass
class Sgd:
  """Gradient descent: plain, with momentum, or with Nesterov momentum.

  With momentum, m <- g + mu m and then x <- x - lr m. With Nesterov momentum,
  the second step is x <- x - lr (g + mu m). `optax.sgd` computes the same.

  Attributes:
    learning_rate: lr.
    momentum: mu; None: no momentum.
    nesterov: Whether momentum is Nesterov's.
    count: Number of steps taken.
    trace: m of every leaf, by name.
  """

  learning_rate: LearningRate
  momentum: float | None = None
  nesterov: bool = False
  count: int = 0
  trace: dict[str, Any] = dataclasses.field(default_factory=dict)

  def step(self, params: Arrays, grads: Arrays) -> Arrays:
    """Returns the parameters after one step along `grads`.

    The state of the optimizer changes in place.
    """
    lr = rate_at(self.learning_rate, self.count)
    self.count += 1
    return {name: params[name] - lr * self._move(name, grads) for name in grads}

  def _move(self, name: str, grads: Arrays):
    """Updates m of a leaf, and returns the leaf's step without lr."""
    g = grads[name]
    mu = self.momentum
    if mu is None:
      return g
    self.trace[name] = g + mu * self.trace.get(name, np.zeros_like(g))
    return g + mu * self.trace[name] if self.nesterov else self.trace[name]


@dataclasses.dataclass
class AdamW:
  """Adam with weight decay that is decoupled and scaled by the learning rate.

  A step computes, for parameters x with the gradient g:

    m <- b1 m + (1 - b1) g      m' = m / (1 - b1^t)
    v <- b2 v + (1 - b2) g^2    v' = v / (1 - b2^t)
    x <- x - lr (m' / (sqrt(v') + eps) + decay x)

  m and v start at zero. So after t steps, the weights of the gradients in m add
  up to 1 - b1^t only, and m' is divided by this sum. With Nesterov, m' is
  instead b1 m / (1 - b1^(t + 1)) + (1 - b1) g / (1 - b1^t). `optax.adamw`
  computes the same.

  Source: Loshchilov and Hutter, 2017, arXiv 1711.05101, Algorithm 2.

  Attributes:
    learning_rate: lr.
    b1: Decay rate of m, the mean of gradients.
    b2: Decay rate of v, the mean of squared gradients.
    eps: Number that is added to the square root.
    weight_decay: Fraction of x, times lr, that a step subtracts.
    nesterov: Whether m' is that of Nesterov.
    count: Number of steps taken, t.
    mean: m of every leaf, by name.
    square: v of every leaf, by name.
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
    """Returns the parameters after one step along `grads`.

    The state of the optimizer changes in place.
    """
    lr = rate_at(self.learning_rate, self.count)
    self.count += 1
    return {
      name: params[name]
      - lr * (self._move(name, grads[name]) + self.weight_decay * params[name])
      for name in grads
    }

  def _move(self, name: str, g: np.ndarray):
    """Updates m and v of a leaf, and returns m' / (sqrt(v') + eps)."""
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
  """Returns a weighted mean of t gradients from their moving average m.

  The moving average starts at zero, so the weights in m add up to 1 - b^t only.
  The plain mean is m divided by this sum. Nesterov's mean, b m + (1 - b) g,
  counts the last gradient g once more, with m divided by 1 - b^(t + 1) and g by
  1 - b^t.
  """
  if not nesterov:
    return m / (1 - b**t)
  return b * m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)


@dataclasses.dataclass
class Muon:
  """Steps along an orthogonal matrix near the momentum; AdamW for the rest.

  Step t computes, for a matrix x with the gradient g:

    m <- b m + (1 - b) g
    n = b m / (1 - b^(t + 1)) + (1 - b) g / (1 - b^t)    (Nesterov's mean)
    x <- x - lr (0.2 sqrt(max(rows, columns)) orthogonal(n) + decay x)

  The entries of an orthogonal matrix have the mean square
  1 / max(rows, columns). So without decay, the entries of a step have a root
  mean square of about 0.2 lr, as those of AdamW have. In a leaf
  [layers, rows, columns], each layer is a matrix.

  Source: Jordan et al., 2024, "Muon"; the size: Liu et al., 2025, arXiv
  2502.16982, section 2.2. The fast code: `inner_optimizer` in
  dilocox_jax/optimizers.py.

  Attributes:
    learning_rate: lr of the matrices.
    matrices: Names of the leaves with orthogonal steps.
    rest: AdamW for all other leaves, with a learning rate of its own.
    momentum: b.
    weight_decay: Fraction of x, times lr, that a step subtracts.
    count: Number of steps taken, t.
    mean: m of every matrix, by name.
  """

  learning_rate: LearningRate
  matrices: Collection[str]
  rest: AdamW
  momentum: float = 0.95
  weight_decay: float = 0.0
  count: int = 0
  mean: dict[str, Any] = dataclasses.field(default_factory=dict)

  def step(self, params: Arrays, grads: Arrays) -> Arrays:
    """Returns the parameters after one step along `grads`.

    The state of the optimizer changes in place.
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
    """Updates m of a matrix, and returns its orthogonal step without lr."""
    old = self.mean.get(name, np.zeros_like(g))
    self.mean[name] = m = self.momentum * old + (1 - self.momentum) * g
    n = _mean(m, g, self.momentum, self.count, nesterov=True)
    return 0.2 * np.sqrt(max(g.shape[-2:])) * orthogonal(n)


def orthogonal(matrix: np.ndarray) -> np.ndarray:
  """Brings the singular values of matrices [..., rows, columns] close to 1.

  Five steps of Newton-Schulz, X <- a X + b (X X^T) X + c (X X^T)^2 X, take each
  singular value s to a s + b s^3 + c s^5. The first X is the matrix divided by
  its norm, so that no singular value is above 1. In the end singular values lie
  between 0.7 and 1.2, except for those that were close to 0. The singular
  vectors stay.

  Source: Jordan et al., 2024, "Muon", with its a, b and c.
  """
  x = matrix / (np.linalg.norm(matrix, axis=(-2, -1), keepdims=True) + 1e-8)
  for _ in range(5):
    square = x @ np.swapaxes(x, -2, -1)
    x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
  return x


def polynomial_average(iterates: Sequence[Arrays], power: float) -> Arrays:
  """Returns the average of x_1 ... x_t with about s^power as the weight of x_s.

  The weights are s (s + 1) ... (s + power - 1), divided by their sum. For power
  = 2 and t = 3 they are 2, 6 and 12, divided by 20. For a power that is no
  whole number, the gamma function continues the product. The fast code is in
  outer/average.py.

  Source: Shamir and Zhang, 2013, arXiv 1212.1824, section 4.

  Args:
    iterates: x_1 ... x_t, at least one, each a tree of arrays by name.
    power: Power of s in the weights.
  """
  weights = [1.0]
  for s in range(1, len(iterates)):
    # The last factor is the ratio of the weights of x_(s + 1) and x_s.
    weights.append(weights[-1] * (s + power) / s)
  shares = np.array(weights) / sum(weights)
  return {
    name: np.tensordot(shares, np.stack([x[name] for x in iterates]), axes=1)
    for name in iterates[0]
  }
