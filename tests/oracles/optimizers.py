"""Optimizers with optax's arithmetic, each holding the state of one tree.

A tree here is a flat dict of leaves. State starts at zero on the first step.
Copy an optimizer with copy.deepcopy: its state goes with it. A learning rate
may be a function of the number of steps taken before, as in optax.
"""

import numpy as np


def rate(learning_rate, count):
  """The learning rate of step `count`, the first being 0."""
  if callable(learning_rate):
    return learning_rate(count)
  return learning_rate


class Sgd:
  """optax.sgd: plain, with momentum, or with Nesterov momentum."""

  def __init__(self, learning_rate, momentum=None, nesterov=False):
    self.learning_rate = learning_rate
    self.momentum = momentum
    self.nesterov = nesterov
    self.count = 0
    self.trace = {}

  def step(self, params, grads):
    lr = rate(self.learning_rate, self.count)
    self.count += 1
    new = {}
    for name in params:
      update = grads[name]
      if self.momentum is not None:
        old = self.trace.get(name, np.zeros_like(update))
        self.trace[name] = grads[name] + self.momentum * old
        update = self.trace[name]
        if self.nesterov:
          update = grads[name] + self.momentum * self.trace[name]
      new[name] = params[name] - lr * update
    return new


class AdamW:
  """optax.adamw: decay is decoupled, and scaled by the learning rate."""

  def __init__(
    self, learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-4
  ):
    self.learning_rate = learning_rate
    self.b1 = b1
    self.b2 = b2
    self.eps = eps
    self.weight_decay = weight_decay
    self.count = 0
    self.mu = {}
    self.nu = {}

  def step(self, params, grads):
    lr = rate(self.learning_rate, self.count)
    self.count += 1
    new = {}
    for name in params:
      g = grads[name]
      mu = self.mu.get(name, np.zeros_like(g))
      nu = self.nu.get(name, np.zeros_like(g))
      self.mu[name] = self.b1 * mu + (1 - self.b1) * g
      self.nu[name] = self.b2 * nu + (1 - self.b2) * g**2
      mu_hat = self.mu[name] / (1 - self.b1**self.count)
      nu_hat = self.nu[name] / (1 - self.b2**self.count)
      update = mu_hat / (np.sqrt(nu_hat) + self.eps)
      update = update + self.weight_decay * params[name]
      new[name] = params[name] - lr * update
    return new
