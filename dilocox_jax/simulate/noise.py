"""Seeded jitter of steps and transfers, equal on both simulator paths."""

from typing import Any

import numpy as np

from dilocox_jax.simulate.sites import Jitter


class Noise:
  """Lognormal factors with mean 1, drawn in the order of the script.

  Step and transfer times of shared machines are skewed and never negative, as
  a lognormal is. For a normal x with mean -sigma^2 / 2, exp(x) has mean 1, so
  jitter does not make the mean step longer. With sigma = 0.1 two in three
  steps take between 0.90 and 1.10 of the mean. A barrier of M replicas still
  waits for the slowest of them, so jitter does make a run longer.

  Steps and transfers have streams of their own: a run that sends more often
  draws the same step times.
  """

  def __init__(self, jitter: Jitter, num_replicas: int):
    """Starts from the seed.

    Args:
      jitter: Sigmas and seed of the noise.
      num_replicas: M.
    """
    self._jitter, self._num_replicas = jitter, num_replicas
    self._steps, self._transfers = np.random.default_rng(jitter.seed).spawn(2)

  def steps(self, num_steps: int) -> np.ndarray:
    """Returns the duration of some inner steps, in mean steps, [M]."""
    sigma = self._jitter.step_sigma
    if not sigma:
      return np.full(self._num_replicas, float(num_steps))
    drawn = _factors(self._steps, sigma, (num_steps, self._num_replicas))
    return drawn.sum(axis=0)

  def transfers(self, num_steps: int) -> np.ndarray:
    """Returns factors on the sizes of messages, [message steps, M]."""
    shape = (num_steps, self._num_replicas)
    sigma = self._jitter.transfer_sigma
    return _factors(self._transfers, sigma, shape) if sigma else np.ones(shape)

  def get_state(self) -> list[dict[str, Any]]:
    """Returns the state of both streams, as plain values."""
    streams = (self._steps, self._transfers)
    return [dict(stream.bit_generator.state) for stream in streams]

  def set_state(self, state: list[dict[str, Any]]) -> None:
    """Goes on from what `get_state` returned."""
    streams = (self._steps, self._transfers)
    for stream, bits in zip(streams, state, strict=True):
      stream.bit_generator.state = bits


def _factors(generator, sigma: float, shape: tuple[int, ...]) -> np.ndarray:
  return np.exp(generator.normal(-(sigma**2) / 2, sigma, shape))
