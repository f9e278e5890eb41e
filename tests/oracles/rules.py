"""What happens to one fragment when it is measured, sent and applied.

One theta for all replicas: the rules synchronous, reset, continue and mix. `w`
is the list of the replicas' leaves and is changed in place. A list of
pseudo-gradients has one flat dict a replica.
"""

import copy
import dataclasses
from typing import Any


@dataclasses.dataclass
class Settings:
  """What all fragments have in common."""

  rule: str
  sync_interval: int
  overlap_steps: int
  mixing_alpha: float
  outer: Any


def mean(trees):
  """Mean over replicas of flat dicts."""
  return {n: sum(tree[n] for tree in trees) / len(trees) for n in trees[0]}


class Shared:
  """A fragment whose outer parameters are the same for all replicas."""

  def __init__(self, settings, names, start, w, leaves0):
    rule, tau = settings.rule, settings.overlap_steps
    assert rule in ("synchronous", "reset", "continue", "mix"), rule
    assert rule != "synchronous" or tau == 0
    assert rule != "mix" or tau < settings.sync_interval
    self.settings, self.names, self.start, self.w = settings, names, start, w
    self.theta = {n: leaves0[n] for n in names}
    self.outer = copy.deepcopy(settings.outer)
    self.in_flight = []  # (step of sending, pseudo-gradients), oldest first
    self.last_send = 0

  def measure(self):
    deltas = []
    for w_m in self.w:
      deltas.append({n: self.theta[n] - w_m[n] for n in self.names})
    if self.settings.rule == "continue":
      for _, sent in self.in_flight:
        for m in range(len(self.w)):
          for n in self.names:
            deltas[m][n] = deltas[m][n] - sent[m][n]
    return deltas

  def apply(self, deltas):
    old = self.theta
    self.theta = new = self.outer.step(old, mean(deltas))
    alpha = self.settings.mixing_alpha
    for m, w_m in enumerate(self.w):
      for n in self.names:
        if self.settings.rule == "continue":
          w_m[n] = w_m[n] + (new[n] - old[n]) + deltas[m][n]
        elif self.settings.rule == "mix":
          w_m[n] = alpha * w_m[n] + (1 - alpha) * new[n]
        else:
          w_m[n] = new[n]

  def events(self, step):
    """Measure, apply, send: whatever falls on this step, in this order."""
    tau = self.settings.overlap_steps
    is_sent = (step - self.start) % self.settings.sync_interval == 0
    measured = self.measure() if is_sent else None
    if self.in_flight and self.in_flight[0][0] + tau == step:
      self.apply(self.in_flight.pop(0)[1])
    if measured is not None:
      self.last_send = step
      if tau == 0:
        self.apply(measured)
      else:
        self.in_flight.append((step, measured))

  def flush(self, step):
    """Brings in what is in flight, then what was never sent."""
    settings = self.settings
    measure_first = settings.overlap_steps >= settings.sync_interval
    unsent = self.measure() if measure_first else None
    while self.in_flight:
      self.apply(self.in_flight.pop(0)[1])
    if unsent is None:
      unsent = self.measure()
    if step > self.last_send:
      self.theta = self.outer.step(self.theta, mean(unsent))
    for w_m in self.w:
      w_m.update({n: self.theta[n] for n in self.names})

  def thetas(self):
    return [self.theta for _ in self.w]
