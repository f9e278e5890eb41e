"""What a run is judged on, when it is refused, and how it goes on."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax import report
from dilocox_jax.config.sections import EvaluationConfig
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.models import transformer
from dilocox_jax.models.loss import token_loss
from dilocox_jax.outer.round_states import RoundState
from dilocox_jax.training import build, run_text
from dilocox_jax.training.states import TrainingStoppedError
from tests import runs
from tests.aggregators.problem import close, mean_of, named

WIDTH = runs.SEQUENCE_LENGTH + 1

# Evaluation.


def windows(tokens, num_sequences):
  """Evenly spaced windows of a text, whole batches of them."""
  count = num_sequences // runs.BATCH_SIZE * runs.BATCH_SIZE
  whole = len(tokens) // WIDTH
  starts = [n * whole // count * WIDTH for n in range(count)]
  chosen = [tokens[start : start + WIDTH] for start in starts]
  return np.array(chosen).reshape(-1, runs.BATCH_SIZE, WIDTH)


def held_out(num_sequences):
  """Batches held out of a text whose two parts share no byte."""
  validation = np.arange(128, 256, dtype=np.uint8).repeat(5)
  train = np.arange(128, dtype=np.uint8).repeat(50)
  text = Corpus("halves", train, validation, "digest", 256, 2)
  config = runs.settings(evaluation={"num_sequences": num_sequences})
  (batches,) = run_text.held_out(config, text)
  return batches, run_text.streams(config, text), text


def test_a_run_is_judged_on_text_that_it_does_not_train_on():
  batches, streams, text = held_out(8)
  assert batches.min() >= 128
  np.testing.assert_array_equal(batches, windows(text.validation, 8))
  # Two replicas of two sequences a step: 94 steps read all 376 windows.
  seen = np.unique(streams.take(94))
  np.testing.assert_array_equal(seen, np.arange(128))


def check_num_sequences():
  for num_sequences in (4, 10, 30):
    batches, _, text = held_out(num_sequences)
    np.testing.assert_array_equal(
      batches, windows(text.validation, num_sequences)
    )
    assert batches.shape == (num_sequences // 2, 2, WIDTH)


@pytest.fixture(scope="module", name="finished")
def finished_fixture(tmp_path_factory):
  """A run that is evaluated every two rounds."""
  workdir = tmp_path_factory.mktemp("finished")
  config = runs.settings(
    method="diloco",
    total_steps=15,
    evaluation={"interval_steps": 6, "num_sequences": 6},
  )
  return config, runs.train(config, workdir)


def test_the_last_loss_is_that_of_the_last_state_on_validation_text(finished):
  config, trainer = finished
  text = run_text.corpus(config)
  batches = windows(text.validation, 6).astype(np.int32)
  state, _ = runs.saved(trainer.workdir)
  model = runs.programs(config).model
  params = state.fragments[0].params
  loss = jax.jit(lambda batch: model.loss(params, batch))
  (row,) = runs.rows(trainer.workdir, "final")
  expected = np.mean([loss(batch) for batch in batches])
  assert row["outer_loss"] == pytest.approx(expected, rel=1e-6)
  trained_on = windows(text.train, 6).astype(np.int32)
  apart = abs(np.mean([loss(batch) for batch in trained_on]) - expected)
  assert apart > 1e-4 * expected


def check_interval_steps(finished, tmp_path):
  config, trainer = finished
  rows = runs.rows(trainer.workdir, "evaluation")
  assert [row["step"] for row in rows] == [6, 12]
  for interval, steps in ((9, [9]), (0, [])):
    section = EvaluationConfig(interval, 6)
    workdir = tmp_path / str(interval)
    runs.train(dataclasses.replace(config, evaluation=section), workdir)
    rows = runs.rows(workdir, "evaluation")
    assert [row["step"] for row in rows] == steps


def check_judge(finished, workdir):
  """What judges is read once, whole: the loss is that of its tokens."""
  config, _ = finished
  workdir.mkdir()
  lines = (json.dumps({"text": f"some text {n}"}) for n in range(300))
  (workdir / "train.jsonl").write_text("\n".join(lines))
  whole = dataclasses.replace(
    config,
    data=dataclasses.replace(
      config.data,
      source="text_files",
      glob=f"{workdir}/train.jsonl",
      validation_fraction=0.5,
      judge_fraction=0.5,
    ),
    evaluation=EvaluationConfig(6, 0),
  )
  text = runs.train(whole, workdir / "run").data.text
  assert text is not None and text.judge is not None
  for seen in runs.rows(workdir / "run", "evaluation"):
    assert "judge_loss" not in seen
  state, _ = runs.saved(workdir / "run")
  params = state.fragments[0].params
  loss = functools.partial(runs.programs(whole).model.loss, params)
  tokens = text.judge.astype(np.int32)
  # One sequence at a time, of at most L predicted tokens.
  length = runs.SEQUENCE_LENGTH
  cuts = range(0, len(tokens) - 1, length)
  parts = [tokens[None, cut : cut + length + 1] for cut in cuts]
  losses = [float(loss(jnp.asarray(part))) for part in parts]
  sizes = [part.size - 1 for part in parts]
  assert len(set(sizes)) > 1
  (row,) = runs.rows(workdir / "run", "final")
  expected = np.average(losses, weights=sizes)
  assert row["judge_loss"] == pytest.approx(expected, rel=1e-5)
  page = report.write_report(workdir / "run").read_text()
  assert f"| loss on the text that judges | {row['judge_loss']:.4f}" in page


def test_every_setting_of_evaluation_counts(finished, tmp_path):
  checks = {
    "interval_steps": lambda: check_interval_steps(finished, tmp_path),
    "num_sequences": check_num_sequences,
  }
  for field in dataclasses.fields(EvaluationConfig):
    checks[field.name]()


# Before each save, and after it.


def apart(tree, replica):
  """The same arrays, but one replica's copy of one is off by one bit."""
  leaves, structure = jax.tree.flatten(tree)
  shared = leaves[0]
  parts = [np.asarray(shard.data).copy() for shard in shared.addressable_shards]
  first = parts[replica].reshape(-1)[:1]
  first[:] = np.nextafter(first, np.float32(np.inf))
  devices = [shard.device for shard in shared.addressable_shards]
  leaves[0] = jax.make_array_from_single_device_arrays(
    shared.shape,
    shared.sharding,
    [jax.device_put(*pair) for pair in zip(parts, devices, strict=True)],
  )
  return jax.tree.unflatten(structure, leaves)


@pytest.mark.parametrize(("step", "kept"), [(3, []), (6, ["3"]), (9, ["6"])])
def test_a_state_whose_copies_differ_is_refused_and_not_saved(
  step, kept, tmp_path
):
  config = runs.settings(
    method="diloco",
    total_steps=9,
    layout="mesh",
    evaluation={"interval_steps": 0},
    checkpoint={"interval_steps": 3, "keep": 1},
  )
  trainer = runs.trainer(config, tmp_path)
  dispatch = trainer._dispatch

  def dispatch_and_spoil(state, segment):
    state, dispatched = dispatch(state, segment)
    if segment.stop == step:
      assert isinstance(state, RoundState)
      (fragment,) = state.fragments
      fragment = fragment._replace(params=apart(fragment.params, 1))
      state = state._replace(fragments=(fragment,))
    return state, dispatched

  trainer._dispatch = dispatch_and_spoil
  with pytest.raises(TrainingStoppedError, match=f"differ after step {step}"):
    runs.run(trainer)
  saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
  assert saved == kept


def resumed(config, workdir):
  """The controller's state at the first step of a resumed run, and the step."""
  trainer = runs.trainer(config, workdir)
  seen = []

  def stop(state, segment):
    seen.append((segment.start, trainer.controller.get_state()))
    raise runs.Killed

  trainer._dispatch = stop
  with pytest.raises(runs.Killed):
    runs.run(trainer)
  return seen[0]


@pytest.mark.slow
def test_a_run_goes_on_with_the_choice_and_the_measurements_it_had(tmp_path):
  config = runs.settings(
    method="diloco",
    model={"activation": "gelu", "tied_head": True},
    evaluation={"interval_steps": 0},
    checkpoint={"interval_steps": 3},
    exchange={"codec": "low_rank(rank=8)"},
    # Half the energy is in a few directions of any matrix: the rank must fall.
    adaptive={"mode": "rank_and_interval", "window_rounds": 2, "energy": 0.5},
  )
  first = runs.trainer(config, tmp_path).controller.get_state()
  half_a_window = runs.train(config, tmp_path, until=3).controller.get_state()
  assert len(half_a_window["measured"]) == 1
  assert half_a_window["choice"] == first["choice"]
  assert resumed(config, tmp_path) == (3, half_a_window)
  whole_window = runs.train(config, tmp_path, until=6).controller.get_state()
  assert whole_window["choice"]["rank"] < first["choice"]["rank"]
  assert resumed(config, tmp_path) == (6, whole_window)


# The pipeline.


def as_sent(boundary):
  """What a stage receives of another's values, by its definition."""

  def bfloat16(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)

  def int8(x):
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    return jnp.round(x / scale) * scale

  return {"none": lambda x: x, "bfloat16": bfloat16, "int8": int8}[boundary]


def by_stages(model, params, tokens, boundary):
  """Loss and gradient of two stages of a layer each, one after the other."""
  sent, length = as_sent(boundary), runs.SEQUENCE_LENGTH
  blocks = [jax.tree.map(lambda x, n=n: x[n], params["blocks"]) for n in (0, 1)]
  rest = {name: x for name, x in params.items() if name != "blocks"}

  def first(block, rest):
    return model.block(block, model.embed(rest, tokens[:, :-1]), length)

  def second(block, rest, x):
    logits = model.logits(rest, model.block(block, x, length))
    return token_loss(logits, tokens[:, 1:].reshape(-1))

  x, back = jax.vjp(first, blocks[0], rest)
  loss, of_second = jax.value_and_grad(second, (0, 1, 2))(
    blocks[1], rest, sent(x)
  )
  of_first = back(sent(of_second[2]))
  stacked = jax.tree.map(lambda *x: jnp.stack(x), of_first[0], of_second[0])
  return loss, {
    **jax.tree.map(jnp.add, of_first[1], of_second[1]),
    "blocks": stacked,
  }


@pytest.mark.parametrize(
  "boundary", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"]
)
def test_stages_send_each_other_what_the_boundary_says(boundary):
  config = runs.settings(
    method="allreduce",
    sync_interval=None,
    layout="mesh",
    mesh={"num_stages": 2, "boundary": boundary},
    inner=runs.MINUS_GRADIENT,
  )
  programs = build.programs(config)
  params = jax.jit(programs.model.init)(jax.random.key(0))
  # Far from where training starts, so that what is lost counts.
  params = jax.tree.map(lambda x: 5 * x, params)
  shape = (2, 1, runs.BATCH_SIZE, WIDTH)  # Replicas, steps, ...
  tokens = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
  steps = programs.steps
  state, seen = steps.steps(steps.init(params), tokens)
  before = named(params)
  found = {n: before[n] - after for n, after in named(state.params).items()}
  plain = jax.jit(by_stages, static_argnums=(0, 3))
  model = transformer.build_model(config.model.shape, unroll=1)
  each = [plain(model, params, own[0], boundary) for own in tokens]
  losses, gradients = zip(*each, strict=True)
  np.testing.assert_allclose(seen.loss[:, 0], losses, rtol=1e-6)
  twin = jax.tree.map(lambda *x: jnp.stack(x), *gradients)
  close(found, named(mean_of(twin)), 1e-5)
