"""Parts of a model are trained, and the rest is there once and never sent."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import dilocox_jax as dx
from dilocox_jax.config.step_memory import share_bytes
from dilocox_jax.models import adapters, weights
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.plan.schedule import methods
from dilocox_jax.training import build, resume, start
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.training.trainer import Trainer
from dilocox_jax.trees import leaves_by_path
from tests import runs

SHAPE = ModelShape(2, 16, 2, 24, 64, num_kv_heads=1, tied_head=False)
MODEL = build_model(SHAPE)
TOKENS = (np.arange(6000) * 7) % 61
LORA = dx.Lora(rank=2, alpha=8.0, products="query,value,down")
SHARDS = {"layout": "mesh", "num_data_shards": 2}
NUM_VALUES = 2 * 2 * (16 + 16 + 16 + 8 + 24 + 16)  # Layers, rank, in and out.


to_host = functools.partial(jax.tree.map, np.asarray)


def checkpoint(folder):
  folder.mkdir()
  params = MODEL.init(jax.random.key(3))
  weights.write_checkpoint(folder, SHAPE, to_host(params))
  return folder


@pytest.fixture(scope="module", autouse=True)
def _programs_are_shared():
  with pytest.MonkeyPatch.context() as patch:
    runs.share_programs(patch)
    yield


@pytest.fixture(scope="module", name="base")
def base_fixture(tmp_path_factory):
  return checkpoint(tmp_path_factory.mktemp("base") / "llama")


def train(workdir, base, trainable: Any = LORA, mesh=None, **sync):
  return dx.train(
    data=(TOKENS, TOKENS[:500]),
    trainable=trainable,
    workdir=workdir,
    steps=24,
    replicas=2,
    config={
      "model": vars(SHAPE) | {"z_loss": 0.1},
      "mesh": mesh or {},
      "sync": {"method": "diloco", "sync_interval": 4, **sync},
      "data": {"batch_size": 4, "sequence_length": 16},
      "inner": {"optimizer": "adamw", "learning_rate": 0.05, "warmup_steps": 2},
      "checkpoint": {"interval_steps": 8, "init_from": str(base)},
      "evaluation": {"interval_steps": 8, "num_sequences": 8},
    },
  )


@pytest.fixture(scope="module", name="run", params=[{}, SHARDS])
def run_fixture(request, base, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run") / "whole"
  return train(workdir, base, mesh=request.param)


def test_adapters_train_and_go_on_to_the_same_bits(
  run, base, tmp_path, monkeypatch
):
  mesh = run.config.to_mapping()["mesh"]
  first, *_, last = run.metrics.evaluations
  assert last.outer_loss < first.outer_loss - 0.01
  assert sum(leaf.size for leaf in jax.tree.leaves(run.params)) == NUM_VALUES
  with monkeypatch.context() as patch, pytest.raises(runs.Killed):
    patch.setattr(Trainer, "_dispatch", runs.killed(16))
    train(tmp_path, base, mesh=mesh)
  runs.assert_same_bits(train(tmp_path, base, mesh=mesh).params, run.params)
  loaded = dx.load(run.workdir)
  runs.assert_same_bits(loaded.model, run.model)


def test_data_shards_train_what_one_device_trains(run, base, tmp_path):
  other = train(tmp_path, base)
  chex.assert_trees_all_close(run.params, other.params, rtol=0, atol=2e-6)
  a, b = ([e.outer_loss for e in r.metrics.evaluations] for r in (run, other))
  np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_what_is_sent_is_the_adapter_alone(run):
  (sent,) = {row.sent_bytes for row in run.metrics.rounds}
  assert sent == 2 * 4 * (NUM_VALUES + 1) / 2  # A ring of two, in fp32.
  record = run.metrics.record
  assert record["parameter_count"] == NUM_VALUES
  digest = run.overrides.trainable.digest
  assert record["overrides"] == ["data", f"frozen weights {digest}"]


def test_the_base_keeps_its_bytes_and_is_there_once(run, base):
  _, before = weights.read_checkpoint(base)
  frozen = build.programs(run.config, run.overrides).rounds.frozen
  runs.assert_same_bits(to_host(frozen), before)  # No replica axis either.
  parts = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(frozen)]
  share = share_bytes(SHAPE.parameter_shapes, run.config.division)
  assert sum(part.nbytes for part in parts) == share
  part = run.overrides.trainable  # Folding leaves the kernels as they are.
  part.fold(to_host(run.params), part.frozen)
  runs.assert_same_bits(part.frozen, before)


def test_other_frozen_values_are_refused_and_a_run_may_be_what_is_frozen(run):
  values = run.config.to_mapping()
  values["mesh"] |= {"layout": "mesh", "num_replicas": 99}  # Elsewhere.
  for source in ("", str(run.workdir)):
    values["checkpoint"]["init_from"] = source
    own = start.with_trainable(dx.RunConfig.from_mapping(values), NO_OVERRIDES)
    assert own.trainable
  runs.assert_same_bits(own.trainable.frozen, to_host(run.model))
  with pytest.raises(dx.RefusedError, match="frozen weights"):
    resume.check_same_overrides(run.metrics.record, own)


def test_frozen_values_under_other_names_are_refused():
  ones, zeros = np.ones(2), np.zeros(2)
  models = (
    {"trained": ones, "a": ones, "b": zeros},
    {"trained": ones, "b": ones, "c": zeros},  # The value of b has changed.
  )
  one, other = (
    Overrides(trainable=adapters.adapt(lambda path: path == "trained", model))
    for model in models
  )
  record = {"overrides": one.names}
  resume.check_same_overrides(record, one)
  with pytest.raises(dx.RefusedError, match="frozen weights"):
    resume.check_same_overrides(record, other)


def test_folded_adapters_have_the_same_logits(run):
  part = run.overrides.trainable
  frozen = jax.tree.map(jnp.asarray, part.frozen)
  joined = part.join(run.params, frozen)
  tokens = jnp.asarray(TOKENS[None, :12])
  beside = MODEL.apply(joined, tokens)
  folded = MODEL.apply(run.model, tokens)
  plain = MODEL.apply(frozen, tokens)
  np.testing.assert_allclose(beside, folded, atol=2e-5)
  assert np.abs(plain - folded).max() > 0.01


def test_adapters_are_exported_under_the_names_of_peft(run, tmp_path):
  run.export(tmp_path / "adapter")
  found = load_file(tmp_path / "adapter/adapter_model.safetensors")
  modules = {"query": "self_attn.q_proj", "value": "self_attn.v_proj"}
  modules |= {"down": "mlp.down_proj"}
  expected = {}
  for path, leaf in leaves_by_path(run.params).items():
    *_, product, name = path.split("/")
    end = f"{modules[product]}.lora_{name[-1].upper()}.weight"
    for number, one in enumerate(leaf):
      key = f"base_model.model.model.layers.{number}.{end}"
      expected[key] = np.asarray(one.T)
  assert len(expected) == 12
  runs.assert_same_bits(found, expected)
  settings = (tmp_path / "adapter/adapter_config.json").read_text()
  for part in ('"r": 2', '"lora_alpha": 8.0', '"q_proj"', '"down_proj"'):
    assert part in settings


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Of transformers' own.
def test_logits_are_those_of_peft(run, base, tmp_path):
  """Runs in `make check-transformers`, which installs `peft` too."""
  peft = pytest.importorskip("peft")
  transformers, torch = map(pytest.importorskip, ("transformers", "torch"))
  run.export(tmp_path)
  model = transformers.AutoModelForCausalLM.from_pretrained(base)
  theirs = peft.PeftModel.from_pretrained(model, tmp_path).eval()
  tokens = TOKENS[None, :12]
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens)).logits.numpy()
  found = MODEL.apply(run.model, jnp.asarray(tokens))
  np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_predicate_says_what_is_trained(base, tmp_path):
  slices = {"method": "overlap_loco", "num_fragments": 2}
  run = train(tmp_path, base, lambda path: "norm" in path, **slices)
  trained = leaves_by_path(run.params)
  assert trained and all("norm" in path for path in trained)
  _, before = weights.read_checkpoint(base)
  kept = leaves_by_path(run.model)
  assert kept.keys() == leaves_by_path(before).keys()
  for path, leaf in leaves_by_path(before).items():
    assert (path in trained) != np.array_equal(kept[path], leaf), path


def test_a_transform_and_rounds_leave_out_what_is_frozen():
  whole = {"base": jnp.full(3, 2.0), "own": jnp.zeros(3)}
  inner = optax.sgd(0.1, momentum=0.9)
  tx = dx.diloco(inner, sync_interval=2, trainable=lambda path: path == "own")

  def loss(own, base, batch):
    return jnp.sum((own + base - batch) ** 2)

  def step(params, state, batch):
    grads = jax.grad(lambda p: loss(p["own"], p["base"], batch))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params: Any = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), whole)
  state = jax.vmap(tx.init)(params)
  arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.size > 2]
  assert {leaf.shape for leaf in arrays} == {(2, 3)} and len(arrays) == 3
  batches = jnp.ones((2, 4, 3))
  for number in range(4):
    params, state = jax.vmap(step, axis_name="replica")(
      params, state, batches[:, number]
    )
  assert params["base"].tolist() == [[2.0] * 3] * 2

  def inner_step(own, state, batch, frozen):
    value, grads = jax.value_and_grad(loss)(own, frozen, batch)
    updates, state = inner.update(grads, state, own)
    return optax.apply_updates(own, updates), state, (value, value)

  rounds = dx.make_rounds(
    methods.diloco(2),
    inner_step,
    optax.sgd(0.7, momentum=0.6, nesterov=True),
    num_replicas=2,
    frozen=whole["base"],
  )
  run = rounds.init(whole["own"], inner.init(whole["own"]))
  run, *_ = rounds.run(run, batches)
  found = rounds.outer_params(run)
  np.testing.assert_allclose(params["own"], jnp.stack([found] * 2), rtol=1e-6)


@pytest.mark.parametrize(
  ("trainable", "message"),
  [
    (dx.Lora(rank=2, products="gat"), "product of lora.products 'gat'.*gate"),
    (dx.Lora(), "needs a rank"),
    (lambda path: False, "true for no leaf"),
    ("lora", "must be a dilocox_jax.Lora"),
    (lambda path: "norm" in path, "stages train all .* mesh.num_stages=1"),
  ],
)
def test_what_cannot_be_trained_is_refused(base, trainable, message, tmp_path):
  with pytest.raises((TypeError, ValueError), match=message):
    train(tmp_path, base, trainable, mesh=SHARDS | {"num_stages": 2})
