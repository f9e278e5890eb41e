"""Parts from outside the package are trained, counted and simulated."""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.config import to_plan
from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.methods import with_interval
from dilocox_jax.training import build, run_text
from dilocox_jax.trees import shapes_by_path
from tests import runs as trained
from tests.extensions import parts, runs
from tests.extensions.conftest import REGISTRIES
from tests.extensions.growing import GrowingSchedule, growing
from tests.oracles import least_squares
from tests.outer import nano
from tests.outer.problem import assert_equal, nesterov, run_rounds

DILOCO = {"method": "diloco", "sync_interval": 3}
ENDS = [2, 4, 8, 12, 20, 28]  # Of growing rounds, H = 2.


def growing_run(num_steps=10):
  return runs.config(num_steps, sync={"method": "growing", "sync_interval": 2})


def own_model(mesh=None):
  return runs.config(
    mesh={"num_replicas": 2, **(mesh or {})},
    model={"preset": "running_mean", "model_dim": 32},
    data={"source": "sums", "batch_size": 4, "sequence_length": 16},
    sync={"method": "diloco", "sync_interval": 4},
    inner={"warmup_steps": 2, "learning_rate": 1e-2},
  )


def test_a_schedule_counts_its_own_rounds():
  schedule = GrowingSchedule(2)
  starts = [0, *ENDS[:-1]]
  for index, (start, end) in enumerate(zip(starts, ENDS, strict=True)):
    assert schedule.round_at(start) == (index, end - start)
    (window,) = schedule.windows(start, end)
    assert window.num_steps == end - start
    assert window.sent and window.sent.step == end
  assert not schedule.flush_windows(8)


def test_a_run_of_a_schedule_trains_and_its_flush_sends_the_rest():
  config = growing_run()
  assert config.outer.momentum == 0.9  # Its recipe.
  segments = list(to_plan.run_plan(config).segments())
  assert [segment.num_steps for segment in segments] == [2, 2, 4, 2]
  programs, state = runs.assert_it_trains(config)
  _, drifts = programs.rounds.flush(state)
  assert len(drifts) == 1
  per_exchange = to_plan.traffic(config).exchange_bytes(0)
  # After 2, 4, 8 and 10 steps.
  assert runs.simulated(config).sent_bytes == 4 * per_exchange


def test_a_rule_is_that_of_the_package_which_does_the_same():
  problem = least_squares.make_problem(4, 3, 12, 4, 2, 3)
  mix = methods.delayed(4, 1, 2, "mix", 0.5)
  ours = dataclasses.replace(mix, rule="halfway")
  expected, found = (
    run_rounds(problem, method, optax.sgd(0.1), nesterov(), num_steps=8)[:2]
    for method in (mix, ours)
  )
  assert_equal(found, expected)


def test_a_config_names_rule_and_outer_optimizer():
  config = runs.config(
    sync={
      "method": "delayed",
      "sync_interval": 3,
      "overlap_steps": 1,
      "rule": "halfway",
    },
    outer={"optimizer": "clipped_momentum", "learning_rate": 0.9},
  )
  _, state = runs.assert_it_trains(config)
  counts = optax.tree.get_all_with_path(state.fragments[0].optimizer, "count")
  assert [int(count) for _, count in counts] == [3]  # The fourth is in flight.
  assert runs.simulated(config).num_steps == 12


def test_an_optimizer_gets_the_options_that_it_has():
  built = named_optimizer("clipped_momentum", 0.5, momentum=0.3, nesterov=True)
  params = {"w": jax.numpy.asarray([3.0, 4.0])}
  updates: Any = built.update(params, built.init(params), params)[0]
  assert updates["w"].tolist() == pytest.approx([-0.3, -0.4])


def test_a_model_is_trained_on_a_source_whole_and_in_stages():
  stages = {"layout": "mesh", "num_stages": 2}
  losses = []
  for mesh in ({}, stages):
    config = own_model(mesh)
    model = build.programs(config).model
    found = shapes_by_path(jax.eval_shape(model.init, jax.random.key(0)))
    assert found == to_plan.traffic(config).shapes
    text = run_text.corpus(config)
    assert text.name == "sums"
    batches = run_text.streams(config, text).take(12)
    losses.append(nano.train(config, batches)[2].loss)
  np.testing.assert_allclose(*losses, rtol=1e-5)
  assert losses[1][:, -1].mean() < losses[1][:, 0].mean() - 0.05
  assert runs.simulated(own_model()).num_steps == 12


@pytest.mark.slow
def test_a_run_of_several_parts_writes_its_rows_and_checkpoints(tmp_path):
  config = runs.config(
    10,
    4,
    sync={"method": "growing", "sync_interval": 2},
    exchange={"kind": "gossip"},
    outer={"optimizer": "clipped_momentum"},
    checkpoint={"interval_steps": 4},
    evaluation={"interval_steps": 4, "num_sequences": 8},
  )
  trained.train(config, tmp_path)
  rounds = trained.rows(tmp_path, "round")
  sent = [drift["step"] for row in rounds for drift in row["drift"]]
  assert sent == [2, 4, 8]
  # Each has a mean of its own, so no cosine follows from it.
  assert not any(drift["cosine"] for row in rounds for drift in row["drift"])
  (final,) = trained.rows(tmp_path, "final")
  assert final["total_sent_bytes"] == runs.simulated(config).sent_bytes
  state, _ = trained.saved(tmp_path)
  leaves = jax.tree.leaves(state.fragments[0].params)
  assert {leaf.shape[0] for leaf in leaves} == {4}


@dataclasses.dataclass(frozen=True)
class Miscounted(GrowingSchedule):
  def round_at(self, step):
    index, num_steps = super().round_at(step)
    return index, 2 * num_steps


def miscounted() -> dx.Method:
  return dx.Method(Miscounted(2))


@dataclasses.dataclass(frozen=True)
class Unbuilt(ModelShape):
  block_shapes = parts.RunningMean.block_shapes


@dataclasses.dataclass(frozen=True)
class Uncounted(ModelShape):
  builder: ClassVar = parts.RunningMean.builder


SIZES = 2, 16, 2, 24, 256


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: dx.register_codec("other", dict), "a dataclass derived from"),
    (lambda: dx.register_method(growing), "'growing' is registered already"),
    (lambda: dx.register_method(miscounted), r"round_at\(4\) has index 2"),
    (
      lambda: dx.register_recipe("growin", {"outer.momentum": 0.5}),
      "did you mean",
    ),
    (
      lambda: dx.register_recipe("diloco", {"outer.nesterov": 0.5}),
      "unknown field of recipe",
    ),
    (
      lambda: dx.register_recipe("growing", {"outer.momentum": 0.5}),
      "registered already",
    ),
    (lambda: with_interval(growing(), 5), "rounds of one length"),
    (
      lambda: dx.growing(optax.sgd(0.1), optax.sgd(1.0), sync_interval=2),
      "take dilocox_jax.make_rounds",
    ),
    (
      lambda: dx.register_rule("new", dx.RuleKind("rule")),
      "build='rule' must be",
    ),
    (
      lambda: dx.register_rule("mix", dx.RuleKind("a:b")),
      "'mix' is registered already",
    ),
    (
      lambda: runs.config(
        sync={
          "method": "delayed",
          "sync_interval": 4,
          "overlap_steps": 4,
          "rule": "halfway",
        }
      ),
      "overlap_steps=4 must be below",
    ),
    (lambda: dx.register_optimizer("sgd", optax.sgd), "take another name"),
    (
      lambda: dx.register_optimizer("new", optax.clip),
      "an argument learning_rate",
    ),
    (
      lambda: dx.register_source("n", lambda path: parts.sums()),
      "unknown argument of data source 'n'",
    ),
    (
      lambda: dx.register_source("sums", parts.sums),
      "registered already",
    ),
    (
      lambda: runs.config(data={"source": "sums", "glob": "x"}),
      "data.glob='x' would be ignored",
    ),
    (lambda: dx.register_model("half", Unbuilt(*SIZES)), "give it both of"),
    (lambda: dx.register_model("half", Uncounted(*SIZES)), "give it both of"),
  ],
)
def test_what_lacks_something_is_refused_and_leaves_no_trace(call, message):
  before = [dict(registry) for registry in REGISTRIES]
  with pytest.raises(ValueError, match=message):
    call()
  assert [dict(registry) for registry in REGISTRIES] == before
