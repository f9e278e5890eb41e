"""Tiny runs of a config, trained and simulated."""

import numpy as np

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.script import Script
from tests.oracles.events import simulate
from tests.outer import nano
from tests.simulate import small


def config(num_steps=12, num_replicas=3, **sections):
  """A config of the nano model; sections are mappings of their fields."""
  return from_mapping(
    {
      "total_steps": num_steps,
      "data": {"batch_size": 4, "sequence_length": nano.SEQUENCE_LENGTH},
      "model": {"preset": "nano", "scan_unroll": 1},
      "inner": {"warmup_steps": 2},
      "mesh": {"num_replicas": num_replicas},
      **sections,
    }
  )


def assert_it_trains(config, batches=None):
  """Trains the nano model; returns (programs, state) at its end."""
  programs, state, metrics = nano.train(config, batches)
  losses = metrics.loss.mean(axis=0)
  assert np.all(np.isfinite(losses))
  assert losses[-2:].mean() < losses[:2].mean() - 0.05
  return programs, state


def simulated(config):
  """The outcome of a run on a small cluster, by formula and by events."""
  traffic, plan = to_plan.traffic(config), to_plan.run_plan(config)
  one = small.cluster(config.mesh.num_replicas)
  costs, work = small.link_costs(one), small.work(one)
  script = Script(traffic)
  by_formula = run_time(costs, work, script.ops(plan))
  by_events = simulate(costs, work, script.ops(plan))
  small.assert_agree(by_formula, by_events)
  return by_formula
