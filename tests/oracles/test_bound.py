import dataclasses
import math

import numpy as np
import pytest

from dilocox_jax.reference import exchanges, methods, optimizers
from tests.oracles import codecs
from tests.oracles.bound import bound_on_pseudo_gradients

SIZE, REPLICAS, ROUNDS, INTERVAL, INNER_RATE = 12, 2, 120, 4, 0.08


def hessians():
  """Hessians of two least-squares problems with the same minimum, at zero."""
  rng = np.random.default_rng(0)
  rows = [rng.normal(size=(30, SIZE)) for _ in range(REPLICAS)]
  return [each.T @ each / len(each) for each in rows]


def averaged_hessian():
  """B of the module's text, and kappa of the replicas' own B_m."""
  own = [
    np.eye(SIZE)
    - np.linalg.matrix_power(np.eye(SIZE) - INNER_RATE * hessian, INTERVAL)
    for hessian in hessians()
  ]
  mean = sum(own) / REPLICAS
  squares = sum(b.T @ b for b in own) / REPLICAS
  undo = np.linalg.inv(mean)
  return mean, np.linalg.eigvalsh(undo.T @ squares @ undo)[-1]


@dataclasses.dataclass
class Measuring(exchanges.ErrorFeedback):
  """Notes |mean of Delta|^2 and the largest loss of the codec."""

  squares: list = dataclasses.field(default_factory=list)
  omega: float = 0.0

  def __deepcopy__(self, memo):
    return self  # The run's only fragment; the test reads it afterwards.

  def average(self, trees):
    mean = np.mean([tree["x"] for tree in trees], axis=0)
    self.squares.append(mean @ mean)
    before = self.residuals or [{"x": np.zeros(SIZE)} for _ in trees]
    found = super().average(trees)
    for tree, owed, left in zip(trees, before, self.residuals, strict=True):
      given = np.linalg.norm(tree["x"] + owed["x"])
      if given > 1e-12:
        lost = float(np.linalg.norm(left["x"]) / given)
        self.omega = max(self.omega, lost)
    return found


def measured(codec, outer_rate, overlap):
  """Running sums of |Delta|^2 and omega of a run of DiLoCoX's `reset`."""
  a = hessians()
  batches = [[m] * (ROUNDS * INTERVAL) for m in range(REPLICAS)]
  exchange = Measuring(exchanges.Lossy(lambda name, leaf: codec(leaf)))
  methods.train(
    lambda w, m: (0.5 * w["x"] @ a[m] @ w["x"], {"x": a[m] @ w["x"]}),
    {"x": np.ones(SIZE)},
    batches,
    inner=optimizers.Sgd(INNER_RATE),
    outer=optimizers.Sgd(outer_rate),
    sync_interval=INTERVAL,
    overlap_steps=overlap * INTERVAL,
    exchange=exchange,
    flush=False,
  )
  return np.cumsum(exchange.squares), exchange.omega


def bound(outer_rate, omega, delay):
  b, kappa = averaged_hessian()
  start = np.ones(SIZE)
  return bound_on_pseudo_gradients(
    float(0.5 * start @ b @ start),
    float(np.linalg.eigvalsh(b)[-1]),
    outer_rate,
    omega=omega,
    delay_rounds=delay,
    dissimilarity=float(kappa),
  )


def in_bits(bits):
  return lambda leaf: np.asarray(codecs.nearest(leaf, bits)[1])


def share(kept):
  return lambda leaf: kept * leaf


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
  "codec, rate",
  [(in_bits(8), 0.5), (in_bits(4), 0.4), (share(0.8), 0.4), (share(0.5), 0.25)],
)
def test_the_bound_holds_at_every_round_with_the_measured_omega(
  codec, rate, delay
):
  sums, omega = measured(codec, rate, delay)
  limit = bound(rate, omega, delay)
  assert len(sums) >= ROUNDS - 1 and 0 < omega < 1
  assert math.isfinite(limit) and (sums <= limit).all()
  # It is no more than a few times what happens.
  assert sums[-1] > 0.1 * limit


def test_a_run_breaks_the_bound_of_an_omega_that_is_understated():
  # A codec that keeps a twentieth, said to lose only a fifth.
  sums, omega = measured(share(0.05), 0.7, 1)
  assert omega == pytest.approx(0.95)
  assert bound(0.7, omega, 1) == math.inf
  assert sums[-1] > bound(0.7, 0.2, 1)


def test_there_is_no_bound_where_the_outer_rate_is_too_high():
  def at(outer_rate):
    return bound_on_pseudo_gradients(
      1.0, 1.0, outer_rate, omega=0.0, delay_rounds=0
    )

  assert at(1.0) == math.inf
  assert at(0.5) == 8
