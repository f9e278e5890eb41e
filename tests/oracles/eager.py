"""The eager rule: every replica has its own theta and outer state.

At a round's end replica m steps with the mean of the round before, in which
its own part is replaced by the fresh one:
g_m = mean_k d_k,t-1 + (d_m,t - d_m,t-1) / M, all zero before the first round.
"""

import copy

import numpy as np

from .rules import mean


class PerReplica:
  """A fragment whose outer parameters differ between replicas."""

  def __init__(self, settings, names, start, w, leaves0):
    assert settings.rule == "eager", settings.rule
    assert settings.overlap_steps == settings.sync_interval
    self.settings, self.names, self.start, self.w = settings, names, start, w
    self.theta = [{n: leaves0[n] for n in names} for _ in w]
    self.outer = [copy.deepcopy(settings.outer) for _ in w]
    self.pending = self.zeros()  # d_t-1 of every replica
    self.last_send = 0

  def zeros(self):
    return [
      {n: np.zeros_like(theta_m[n]) for n in self.names}
      for theta_m in self.theta
    ]

  def measure(self):
    deltas = []
    for theta_m, w_m in zip(self.theta, self.w, strict=True):
      deltas.append({n: theta_m[n] - w_m[n] for n in self.names})
    return deltas

  def apply(self, fresh):
    arrived = mean(self.pending)
    num_replicas = len(self.w)
    for m in range(num_replicas):
      g = {}
      for n in self.names:
        own = (fresh[m][n] - self.pending[m][n]) / num_replicas
        g[n] = arrived[n] + own
      self.theta[m] = self.outer[m].step(self.theta[m], g)
      self.w[m].update(self.theta[m])
    self.pending = fresh

  def events(self, step):
    if (step - self.start) % self.settings.sync_interval == 0:
      self.last_send = step
      self.apply(self.measure())

  def flush(self, step):
    """An eager apply of what is unsent, and one more to let it arrive."""
    has_unsent = step > self.last_send
    self.apply(self.measure() if has_unsent else self.zeros())
    if has_unsent:
      self.apply(self.zeros())

  def thetas(self):
    return self.theta
