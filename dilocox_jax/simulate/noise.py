"""Draws random variation of step and transfer times from a seed."""

from typing import Any

import numpy as np

from dilocox_jax.simulate.sites import Jitter


class Noise:
  """Draws lognormal factors with mean 1, in the order of the operations.

  Step and transfer times of shared machines are skewed and never negative, as
  a lognormal is. For a normal x with mean -sigma^2 / 2, exp(x) has mean 1, so
  jitter does not make the mean step longer. With sigma = 0.1 two in three
  steps take between 0.90 and 1.10 of the mean. A barrier of M replicas still
  waits for the slowest of them, so jitter does make a run longer.

  Inner steps and transfers draw from two separate random streams. So a run
  that sends more often still has the same step times.
  """

  def __init__(self, jitter: Jitter, num_replicas: int):
    """Starts both random streams from the seed.

    Args:
      jitter: Sigmas and seed of the noise.
      num_replicas: Number of replicas, M.
    """
    self._jitter, self._num_replicas = jitter, num_replicas
    self._streams = np.random.default_rng(jitter.seed).spawn(2)

  def steps(self, num_steps: int) -> np.ndarray:
    """Returns how long inner steps take on each replica.

    Args:
      num_steps: Number of inner steps.

    Returns:
      Durations, [M], in units of the mean time of a step. They sum over the
      steps: 10 steps without jitter take 10.0.
    """
    sigma = self._jitter.step_sigma
    if not sigma:
      return np.full(self._num_replicas, float(num_steps))
    drawn = _factors(self._streams[0], sigma, (num_steps, self._num_replicas))
    return drawn.sum(axis=0)

  def transfers(self, num_steps: int) -> np.ndarray:
    """Returns a random factor for the size of every message of a collective.

    A message with the factor 1.1 takes as long as one that is 10% larger.

    Args:
      num_steps: Number of message steps of the collective.

    Returns:
      Factors, [num_steps, M]. All are 1 if transfers have no jitter.
    """
    shape = (num_steps, self._num_replicas)
    sigma = self._jitter.transfer_sigma
    return _factors(self._streams[1], sigma, shape) if sigma else np.ones(shape)

  def get_state(self) -> list[dict[str, Any]]:
    """Returns the state of both random streams, as plain values."""
    return [dict(stream.bit_generator.state) for stream in self._streams]

  def set_state(self, state: list[dict[str, Any]]) -> None:
    """Sets both random streams to a state that `get_state` returned."""
    for stream, stream_state in zip(self._streams, state, strict=True):
      stream.bit_generator.state = stream_state


def _factors(generator, sigma: float, shape: tuple[int, ...]) -> np.ndarray:
  return np.exp(generator.normal(-(sigma**2) / 2, sigma, shape))
