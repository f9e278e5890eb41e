"""Seeded jitter, drawn once and read by both paths of the simulator."""

from typing import Any

import numpy as np

from dilocox_jax.simulate.sites import Jitter


class Noise:
  """Lognormal factors with mean 1, in a fixed order of asking.

  Source: none needed; the lognormal is what step and transfer times of shared
  machines look like, skewed and never negative.
  """

  def __init__(self, jitter: Jitter, num_replicas: int):
    """Starts from the seed.

    Args:
      jitter: Sigmas and seed.
      num_replicas: M.
    """
    self._jitter, self._num_replicas = jitter, num_replicas
    self._steps, self._transfers = np.random.default_rng(jitter.seed).spawn(2)

  def steps(self, num_steps: int) -> np.ndarray:
    """Lengths of a stretch of inner steps, in mean steps; [M]."""
    sigma = self._jitter.step_sigma
    if not sigma:
      return np.full(self._num_replicas, float(num_steps))
    drawn = _factors(self._steps, sigma, (num_steps, self._num_replicas))
    return drawn.sum(axis=0)

  def transfers(self, num_rounds: int) -> np.ndarray:
    """Factors on the bytes' time of messages; [num_rounds, M]."""
    shape = (num_rounds, self._num_replicas)
    sigma = self._jitter.transfer_sigma
    return _factors(self._transfers, sigma, shape) if sigma else np.ones(shape)

  def get_state(self) -> list[dict[str, Any]]:
    """Where both streams stand, as plain values."""
    streams = (self._steps, self._transfers)
    return [dict(stream.bit_generator.state) for stream in streams]

  def set_state(self, state: list[dict[str, Any]]) -> None:
    """Goes on from `get_state`."""
    streams = (self._steps, self._transfers)
    for stream, kept in zip(streams, state, strict=True):
      stream.bit_generator.state = kept


def _factors(generator, sigma: float, shape: tuple[int, ...]) -> np.ndarray:
  return np.exp(generator.normal(-(sigma**2) / 2, sigma, shape))
