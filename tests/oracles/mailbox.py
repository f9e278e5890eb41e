"""What all replicas of a mailbox must have, computed from its lists, in numpy.

    theta_0 = 0; before each event, what is due is applied:
    g = sum over the listed replicas m, in their order, of w_m delta_m / sum w_m
    v = 0.5 v + g; theta = theta - 0.7 (g + 0.5 v)

with delta_m = theta - (what replica m reaches from theta). Values are float32
and added one after the other, so that equal lists give equal bits.
"""

import zlib
from collections.abc import Sequence

import numpy as np

SIZE = 50


def start() -> tuple[np.ndarray, np.ndarray]:
  """Returns the first parameters and momentum."""
  return np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)


def weight(name: str) -> float:
  """Returns the weight of a replica."""
  return 1.0 + zlib.crc32(name.encode()) % 3


def delta(name: str, theta: np.ndarray) -> np.ndarray:
  """Returns the pseudo-gradient of a replica that starts at theta."""
  draw = np.random.default_rng(zlib.crc32(name.encode()))
  target = draw.normal(size=SIZE).astype(np.float32)
  w = theta.copy()
  for _ in range(4):
    w = w - np.float32(0.05) * (w - target)
  return theta - w


def mean(messages: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
  """Returns the weighted mean, added up in the order of the list."""
  total = np.zeros(SIZE, np.float32)
  weights = np.float32(0)
  for each, values in messages:
    total = total + np.float32(each) * values
    weights += np.float32(each)
  return total / weights if weights else total


def outer(
  theta: np.ndarray, momentum: np.ndarray, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns parameters and momentum after an outer step."""
  momentum = np.float32(0.5) * momentum + gradient
  step = gradient + np.float32(0.5) * momentum
  return theta - np.float32(0.7) * step, momentum


def under(
  lists: Sequence[Sequence[tuple[str, float]]], delay: int = 0
) -> np.ndarray:
  """Returns the shared parameters after events with the given members.

  Args:
    lists: Names and weights of the replicas that were averaged, by event, in
      order.
    delay: Events that are sent before the result of one is applied.
  """
  theta, momentum = start()
  pending: list[np.ndarray] = []
  for listed in lists:
    while len(pending) > delay:
      theta, momentum = outer(theta, momentum, pending.pop(0))
    pending.append(mean([(w, delta(name, theta)) for name, w in listed]))
  while len(pending) > delay:
    theta, momentum = outer(theta, momentum, pending.pop(0))
  return theta
