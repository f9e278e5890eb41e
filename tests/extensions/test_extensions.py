"""Parts from outside the package are trained, counted and simulated."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.named import CODECS
from dilocox_jax.codecs.sparse import TopK
from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.config.recipes import RECIPES
from dilocox_jax.data.sources import SOURCES
from dilocox_jax.models.families import family_of
from dilocox_jax.optimizers import OPTIMIZERS, named_optimizer
from dilocox_jax.plan.collectives import COLLECTIVES
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.methods import METHODS, RULES, with_interval
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.script import Script
from dilocox_jax.training import build, run_text, states
from dilocox_jax.trees import shapes_by_path
from tests.contracts import test_bytes, test_codecs
from tests.experiments import programs
from tests.extensions import exchanges, parts, ternary
from tests.extensions.parts import GrowingSchedule
from tests.extensions.ternary import Ternary
from tests.oracles import least_squares
from tests.outer.problem import assert_equal, nesterov, run_rounds
from tests.simulate import small

REGISTRIES: tuple[Any, ...] = (
  CODECS,
  COLLECTIVES,
  METHODS,
  MODEL_PRESETS,
  OPTIMIZERS,
  RECIPES,
  RULES,
  SOURCES,
)
LENGTH = 16
ENDS = [2, 4, 8, 12, 20, 28]  # Of growing rounds, H = 2.
GROWING = {"method": "growing", "sync_interval": 2}
DILOCO = {"method": "diloco", "sync_interval": 3}
HALFWAY = {"method": "delayed", "sync_interval": 3, "rule": "halfway"}


@pytest.fixture(autouse=True)
def registered():
  """All extensions, and afterwards only what was there before."""
  before = [dict(registry) for registry in REGISTRIES]
  for extension in (ternary, parts, exchanges):
    extension.register()
  yield
  for registry, own in zip(REGISTRIES, before, strict=True):
    registry.clear()
    registry.update(own)


def config_of(num_steps=12, **sections):
  """A config of the nano model; sections are mappings of their fields."""
  usual = {
    "total_steps": num_steps,
    "data": {"batch_size": 4, "sequence_length": LENGTH},
    "model": {"preset": "running_mean", "model_dim": 32},
    "inner": {"warmup_steps": 2, "learning_rate": 1e-2},
    "mesh": {"num_replicas": 3},
  }
  return from_mapping(usual | sections)


def tokens(config):
  """Tokens [M, steps, B, L + 1]; each replica repeats motifs of its own."""
  rng = np.random.default_rng(0)
  count = config.mesh.num_replicas
  shape = (config.total_steps, config.data.batch_size, LENGTH + 1)
  motifs = rng.integers(0, config.model.shape.vocab_size, [count, 5])
  starts = rng.integers(0, 5, [count, *shape[:2], 1])
  places = (starts + np.arange(LENGTH + 1)) % 5
  return np.stack(
    [motif[place] for motif, place in zip(motifs, places, strict=True)]
  ).astype(np.int32)


def run(config, batches=None):
  """Runs all rounds; returns (programs, state, losses [M, steps])."""
  programs = build.programs(config)
  losses = []
  batches = tokens(config) if batches is None else batches
  params = states.first_params(programs, config.seed)
  state: Any = states.fresh(programs, "rounds", params)
  for segment in to_plan.run_plan(config).segments():
    part = batches[:, segment.start : segment.stop]
    state, metrics, _ = programs.rounds.run(state, part)
    losses.append(np.asarray(metrics.loss))
  return programs, state, np.concatenate(losses, axis=1)


def trained(config, batches=None):
  """Trains the nano model; returns (programs, state) at its end."""
  programs, state, losses = run(config, batches)
  losses = losses.mean(axis=0)
  assert np.all(np.isfinite(losses))
  assert losses[-2:].mean() < losses[:2].mean() - 0.05
  return programs, state


def simulated(config):
  """The outcome of a run on a small cluster (by formula)."""
  traffic = to_plan.traffic(config)
  plan = to_plan.run_plan(config)
  one = small.cluster(config.mesh.num_replicas)
  ops = Script(traffic).ops(plan)
  return run_time(small.link_costs(one), small.work(one), ops)


# The share of the energy that each loses of values of N(0, 1), and the largest
# share of any input (measured).
TERNARY = {
  "ternary": (Ternary(100), 0.2096, 0.74),
  "low_rank+ternary": (LowRank(2, then=Ternary(100)), 0.8, 0.9),
  "top_k+ternary": (TopK(0.3, 100, then=Ternary(100)), 0.3173, 0.71),
}


@pytest.mark.parametrize("name", TERNARY)
def test_a_codec_keeps_what_every_codec_promises(name):
  test_codecs.keeps_its_promises(*TERNARY[name])


def test_a_codec_by_hand_and_by_name_and_its_bytes():
  # The mean size is 2.2 and the threshold 1.54: 3, -4 and 2 remain.
  values = jnp.asarray([[1.0, 3.0, -4.0, 2.0, -1.0]])
  codes, scales = Ternary().encode([values])
  assert codes.tolist() == [[[1 + 2 * 3 + 0 * 9 + 2 * 27 + 1 * 81]]]
  assert scales.tolist() == [[[3.0]]]
  [found] = Ternary().decode((codes, scales), [values.shape])
  assert found.tolist() == [[0, 3, -3, 3, 0]]
  check = test_bytes.test_an_exchange_moves_the_bytes_of_the_plan
  check(Ternary(), "auto", 3, 1)
  with pytest.raises(ValueError, match="it has: row_size, threshold"):
    dx.named_codec("ternary(bits=2)")
  exchange = {"codec": "ternary(threshold=0.6)", "feedback": 1.0}
  config = config_of(sync=DILOCO, exchange=exchange)
  assert config.exchange.named_codec == Ternary(threshold=0.6)
  trained(config)


def test_a_schedule_counts_its_own_rounds_and_its_flush_sends_the_rest():
  schedule = GrowingSchedule(2)  # pyright: ignore
  starts = [0, *ENDS[:-1]]
  for index, (start, end) in enumerate(zip(starts, ENDS, strict=True)):
    assert schedule.round_at(start) == (index, end - start)
    (window,) = schedule.windows(start, end)
    assert window.num_steps == end - start
    assert window.sent and window.sent.step == end
  config = config_of(10, sync=GROWING)
  assert config.outer.momentum == 0.9  # Its recipe.
  programs, state = trained(config)
  _, drifts = programs.rounds.flush(state)
  assert len(drifts) == 1
  per_exchange = to_plan.traffic(config).exchange_bytes(0)
  assert simulated(config).sent_bytes == 4 * per_exchange  # 2, 4, 8 and 10.


def test_a_rule_is_that_of_the_package_which_does_the_same():
  problem = least_squares.make_problem(4, 3, 12, 4, 2, 3)
  mix = methods.delayed(4, 1, 2, "mix", 0.5)
  ours = dataclasses.replace(mix, rule="halfway")
  expected, found = (
    run_rounds(problem, method, optax.sgd(0.1), nesterov(), num_steps=8)[:2]
    for method in (mix, ours)
  )
  assert_equal(found, expected)


def test_an_optimizer_gets_the_options_that_it_has_and_is_named():
  built = named_optimizer("clipped_momentum", 0.5, momentum=0.3, nesterov=True)
  params = {"w": jnp.asarray([3.0, 4.0])}
  updates: Any = built.update(params, built.init(params), params)[0]
  assert updates["w"].tolist() == pytest.approx([-0.3, -0.4])
  outer = {"optimizer": "clipped_momentum", "learning_rate": 0.9}
  config = config_of(sync=HALFWAY | {"overlap_steps": 1}, outer=outer)
  _, state = trained(config)
  counts = optax.tree.get_all_with_path(state.fragments[0].optimizer, "count")
  assert [int(count) for _, count in counts] == [3]  # The fourth is in flight.


def test_a_model_is_trained_on_a_source_whole_and_in_stages():
  losses = []
  for mesh in ({}, {"layout": "mesh", "num_stages": 2}):
    config = config_of(
      mesh={"num_replicas": 2, **mesh},
      data={"source": "sums", "batch_size": 4, "sequence_length": 16},
      sync=DILOCO,
    )
    model = build.programs(config).model
    found = shapes_by_path(jax.eval_shape(model.init, jax.random.key(0)))
    assert found == to_plan.traffic(config).shapes
    text = run_text.corpus(config)
    assert text.name == "sums"
    batches = run_text.streams(config, text).take(12)
    losses.append(run(config, batches)[2])
  np.testing.assert_allclose(*losses, rtol=1e-5)
  assert losses[1][:, -1].mean() < losses[1][:, 0].mean() - 0.05


@pytest.mark.parametrize("sync", [GROWING, HALFWAY | {"overlap_steps": 1}])
def test_all_parts_from_outside_work_together_in_stages(sync):
  exchange = {"codec": "ternary", "feedback": 1.0, "collective": "gossip"}
  config = config_of(
    mesh={"num_replicas": 2, "layout": "mesh", "num_stages": 2},
    data={"source": "sums", "batch_size": 4, "sequence_length": LENGTH},
    sync=sync,
    exchange=exchange,
    outer={"optimizer": "clipped_momentum", "learning_rate": 0.9},
  )
  _, state = trained(config)
  first, second = np.asarray(state.replica.params["head"]["kernel"])
  assert np.isfinite(first).all() and np.isfinite(second).all()
  [swap] = to_plan.traffic(config).exchange(0)
  assert swap.kind == "permute" and swap.sent_bytes(2) == swap.operand_bytes


class Miscounted(GrowingSchedule):
  def round_at(self, step):
    index, num_steps = super().round_at(step)
    return index, 2 * num_steps


def miscounted() -> dx.Method:
  return dx.Method(Miscounted(2))  # pyright: ignore


def with_one_more(shape, **how):
  """A model with a leaf that its shape does not have."""
  model = parts.running_mean(shape, **how)
  more = {"more": jnp.ones(3)}
  return model._replace(init=lambda key: model.init(key) | more)


def build_by(builder):
  """Registers the model with another builder, and builds it for a run."""
  shape = type("Other", (parts.RunningMean,), {"builder": builder})
  with mock.patch.dict(MODEL_PRESETS):
    dx.register_model("other", shape(2, 16, 2, 24, 256))
    build.programs(config_of(model={"preset": "other"}))


def build_apart():
  """Builds a run with a replica that is away, and no shared parameters."""
  rule = dx.ApplyRule(is_shared=False)
  with mock.patch.dict(RULES):
    dx.register_rule("apart", dx.RuleKind(lambda method, axis_name: rule))
    sync = HALFWAY | {"rule": "apart", "overlap_steps": 1}
    build.programs(config_of(sync=sync, membership={"absences": "1:2"}))


REFUSED = {
  "a dataclass derived from": lambda: dx.register_codec("other", dict),
  r"round_at\(4\) has index 2": lambda: dx.register_method(miscounted),
  "method '3': it must be a function": lambda: dx.register_method(3),  # pyright: ignore
  "returns 3 and no Method": lambda: dx.register_method(lambda: 3),  # pyright: ignore
  "rule 3: a name has letters": lambda: dx.register_rule(
    3,  # pyright: ignore
    dx.RuleKind("a:b"),
  ),
  "did you mean 'growing'": lambda: dx.register_recipe("growin", {}),
  "rounds of one length": lambda: with_interval(parts.growing(), 5),
  "take dilocox_jax.make_rounds": lambda: dx.growing(optax.sgd(0.1)),  # pyright: ignore
  "build='rule' must be": lambda: dx.register_rule("r", dx.RuleKind("rule")),
  "rule 'r': 3 must be a RuleKind": lambda: dx.register_rule("r", 3),  # pyright: ignore
  "model 'm': 3 must be a ModelShape": lambda: dx.register_model("m", 3),  # pyright: ignore
  "'apart' with .* gives each replica .* drop membership": build_apart,
  "overlap_steps=4 must be below": lambda: config_of(sync=HALFWAY),
  "take another name": lambda: dx.register_optimizer("sgd", optax.sgd),
  "an argument learning_rate": lambda: dx.register_optimizer("n", optax.clip),
  "argument of data source 'n'": lambda: dx.register_source("n", lambda c: c),
  "glob='x' would be": lambda: config_of(data={"source": "sums", "glob": "x"}),
  "give it both of": lambda: build_by(dx.ModelShape.builder),
  "'other': builder must take": lambda: build_by(lambda shape, dtype: shape),
  "'lost:build': No module": lambda: build_by("lost:build"),
  "be exported": lambda: family_of(parts.RunningMean(2, 16, 2, 24, 256)),  # pyright: ignore
  "'other': .* returns a int": lambda: build_by(lambda _, **how: 1),
  r"a Model \(more: None -> \(3,": lambda: build_by(with_one_more),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_lacks_something_is_refused_and_leaves_no_trace(message):
  before = [dict(registry) for registry in REGISTRIES]
  with pytest.raises(ValueError, match=message):
    REFUSED[message]()
  assert [dict(registry) for registry in REGISTRIES] == before


# Settings of a method from outside, which no field of a config has.


def test_a_methods_own_settings_are_written_behind_its_name():
  config = config_of(sync={"method": "growing(repeats=3, sync_interval=2)"})
  schedule: Any = config.sync.named.schedule
  assert (schedule.repeats, schedule.sync_interval) == (3, 2)
  assert config.sync.method == "growing(repeats=3)"
  assert config.sync.sync_interval == 2
  assert config.outer.momentum == 0.9  # Its recipe's.
  assert from_mapping(config.to_mapping()) == config
  plain = config_of(sync={"method": "growing()", "sync_interval": 2})
  assert plain == config_of(sync=GROWING)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("growing(repeat=3)", "sync.repeat=3 is not a .*did you mean 'repeats'?"),
    ("growing(repeats=many)", "sync.repeats='many' must be of type int"),
    ("growing(repeats=0)", "sync.repeats=0 must be at least 1"),
    (
      "grown(repeats=3)",
      "sync.method='grown' is not known: did you mean 'grow",
    ),
    (
      "growing(3)",
      "sync.method='growing.3.' must be a name, with settings beh",
    ),
    ("growing+diloco", "must be a name, with settings behind it"),
    ("growing(H=3)", "sync.H=3 is not a setting .* mean 'sync_interval'?"),
  ],
)
def test_a_wrong_setting_is_one_line(text, message):
  with pytest.raises(ValueError, match=message) as raised:
    config_of(sync={"method": text})
  assert "\n" not in str(raised.value)


def test_a_flag_sets_what_a_file_of_parts_registers(tmp_path):
  path = tmp_path / "doubling.py"
  path.write_text(
    "import dilocox_jax as dx\n"
    "def doubling(sync_interval=4, rounds: int = 2):\n"
    "  return dx.Method(dx.SyncSchedule(sync_interval * rounds))\n"
    "dx.register_method(doubling)\n"
  )
  done = programs.run(
    "simulate",
    f"--parts={path}",
    "--config.sync.method=doubling(rounds=5)",
    f"--workdir={tmp_path / 'out'}",
  )
  assert done.returncode == 0, done.stderr
  assert "doubling(rounds=5) on 1gbit" in done.stdout
  assert "every 20 steps" in done.stdout
