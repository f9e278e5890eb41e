"""Every setting of `inner`, `outer` and `exchange` reaches what is trained.

What the optimizers, schedules and exchanges make of it is compared with numpy
where they are tested (`tests/test_optimizers.py`, `tests/outer`,
`tests/aggregators`).
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs.named import named_codec
from dilocox_jax.config import to_plan
from dilocox_jax.config.sections import ExchangeConfig, InnerConfig, OuterConfig
from dilocox_jax.training import build, model_functions
from tests import runs

# No value is a default. Muon alone reads all options.
INNER = {
  "optimizer": "muon",
  "learning_rate": 0.05,
  "schedule": "wsd",
  "warmup_steps": 3,
  "final_fraction": 0.7,
  "clip_norm": 3.0,
  "accumulate_steps": 2,
  "b1": 0.7,
  "b2": 0.8,
  "weight_decay": 0.6,
  "momentum": 0.85,
}
OUTER = {
  "optimizer": "rmsprop",
  "learning_rate": 0.3,
  "momentum": 0.8,
  "nesterov": False,
  "average_power": 2.0,
  "schedule": "cosine",
  "final_fraction": 0.4,
}
EXCHANGE = {
  "codec": "int(bits=2)",
  "collective": "reduce_scatter",
  "feedback": 0.6,
  "against": "mean",
}


@pytest.fixture(name="calls")
def calls_fixture(monkeypatch):
  """The last arguments of what `build` makes a run of, by its name."""
  calls = {}

  def spied(name, plain):
    def spy(*args, **options):
      bound = inspect.signature(plain).bind(*args, **options)
      bound.apply_defaults()
      calls[name] = bound.arguments | bound.arguments.get("options", {})
      return plain(*args, **options)

    return spy

  for home, name in (
    (build, "learning_rate_schedule"),
    (build, "inner_optimizer"),
    (build, "named_optimizer"),
    (build, "outer_rate_schedule"),
    (build, "averaged"),
    (build, "mean_exchange"),
    (model_functions, "accumulated_gradient"),
  ):
    monkeypatch.setattr(home, name, spied(name, getattr(home, name)))
  return calls


def settings(**sections):
  return runs.settings(method="diloco", **sections)


def check(section, kind, given, found, but=()):
  """Each field of a section is given, and found as it was given."""
  fields = {field.name for field in dataclasses.fields(kind)} - {*but}
  assert given.keys() == fields
  default = kind()
  for name, value in given.items():
    assert value != getattr(default, name), f"{section}.{name} says nothing"
    assert found[name] == value, f"{section}.{name}"


def test_every_setting_of_the_optimizers_reaches_them(calls):
  build.programs(settings(inner=INNER, outer=OUTER))
  schedule = calls["learning_rate_schedule"]
  inner = calls["inner_optimizer"]
  assert schedule["total_steps"] == 21
  _, micro_batches = calls["accumulated_gradient"].values()
  own = {
    **{"optimizer": inner["name"], "learning_rate": schedule["peak"]},
    **{"schedule": schedule["name"], "accumulate_steps": micro_batches},
  }
  check("inner", InnerConfig, INNER, {**inner, **schedule, **own})
  outer = calls["named_optimizer"]
  power = calls["averaged"]["power"]
  rate = calls["outer_rate_schedule"]
  own = {
    "optimizer": outer["name"],
    "average_power": power,
    "learning_rate": rate["peak"],
    "schedule": rate["name"],
    "final_fraction": rate["final_fraction"],
  }
  check("outer", OuterConfig, OUTER, {**outer, **own})


@pytest.mark.parametrize(("momentum", "looks_ahead"), [(0.8, True), (0, False)])
def test_a_momentum_of_zero_does_not_look_ahead(calls, momentum, looks_ahead):
  runs.outer_step(settings(outer={"momentum": momentum}))
  assert calls["named_optimizer"]["nesterov"] == looks_ahead


def test_every_setting_of_an_exchange_reaches_it(calls):
  config = dataclasses.replace(settings(exchange=EXCHANGE), seed=7)
  build.programs(config)
  codec = named_codec(EXCHANGE["codec"])
  assert calls["mean_exchange"]["codec"] == codec == to_plan.codec(config)
  found = {**calls["mean_exchange"], "codec": EXCHANGE["codec"]}
  elsewhere = "keep_unsent", "max_norm_ratio"
  check("exchange", ExchangeConfig, EXCHANGE, found, elsewhere)
  assert found["seed"] == 7
  kept = {"codec": "int", "keep_unsent": True}
  build.programs(settings(exchange=kept))
  assert calls["mean_exchange"]["keep_unsent"]


def test_methods_that_send_gradients_send_them_by_codec_and_others_plain():
  config = runs.settings(
    method="cocktail_sgd",
    sync_interval=None,
    exchange={"codec": "int", "feedback": 1.0},
    outer={"average_power": 2.0},
  )
  programs = build.programs(config)
  assert programs.steps.aggregator is programs.rounds.outer.aggregator
  params = programs.model.init(jax.random.key(0))
  assert hasattr(programs.steps.optimizer.init(params), "average")
  warm = settings(exchange={"codec": "int"}, warm_start_steps=3)
  steps = build.programs(warm).steps
  assert not jax.tree.leaves(steps.aggregator.init(params))


def test_training_and_evaluation_go_by_their_own_loss():
  """The z-loss counts in training alone; an evaluation is a mean of batches."""
  batch = jnp.arange(3 * 2 * 17, dtype=jnp.int32).reshape(3, 2, 17)
  plain, made = (
    runs.programs(runs.settings(model={"z_loss": z_loss}, num_replicas=1))
    for z_loss in (0.0, 10.0)
  )
  params = jax.jit(plain.model.init)(jax.random.key(0))
  loss = jax.jit(plain.model.loss)
  each = [float(loss(params, rows)) for rows in batch]
  assert len(set(each)) == 3
  mean = made.evaluate(params, batch)
  np.testing.assert_allclose(mean, np.mean(each), rtol=1e-6)
  trained, _ = jax.jit(made.steps.gradient)(params, batch[0])
  assert float(trained) > each[0] + 1.0
