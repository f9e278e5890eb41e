import dataclasses
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.training import build
from tests import runs
from tests.tiers import slow

DEEP = {"preset": "nano", "num_layers": 8, "model_dim": 64, "ff_dim": 172}


def _of_stages(layout="mesh", **mesh):
  return runs.settings(
    method="diloco",
    layout=layout,
    model=DEEP | {"vocab_size": 64, "z_loss": 1.0},
    data={"batch_size": 8},
    inner={"accumulate_steps": 4},
    mesh=mesh,
  )


def _validation(num_rows=8):
  shape = (3, num_rows, runs.SEQUENCE_LENGTH + 1)
  return np.random.default_rng(2).integers(0, 64, shape, np.int32)


@pytest.mark.parametrize(
  ("mesh", "num_rows"),
  [
    *slow(({"num_stages": 4}, 8)),
    ({"num_stages": 2, "num_data_shards": 2}, 5),
    ({"num_stages": 2, "pipeline": "gpipe"}, 1),
  ],
)
def test_stages_evaluate_a_model_as_one_device_does(mesh, num_rows):
  programs = runs.programs(_of_stages(**mesh))
  plain = runs.programs(_of_stages("stacked"))
  replicas = programs.rounds.replicas
  params = jax.jit(plain.model.init)(jax.random.key(0))
  own = jax.tree.map(lambda x: np.stack([x, 1.1 * x]), jax.device_get(params))
  batches = _validation(num_rows)
  placed = replicas.place(batches, None)
  seen = programs.evaluate(replicas.place_state(params, None), placed)
  expected = plain.evaluate_each(own, batches)
  np.testing.assert_allclose(seen, expected[0], rtol=2e-6)
  each = programs.evaluate_each(replicas.place_state(own, 0), placed)
  np.testing.assert_allclose(each, expected, rtol=2e-6)
  assert abs(expected[0] - expected[1]) > 1e-3


def test_a_stage_evaluates_with_no_layers_but_its_own():
  programs = runs.programs(_of_stages(num_stages=4))
  shapes = jax.eval_shape(programs.model.init, jax.random.key(0))
  batches = jax.ShapeDtypeStruct(_validation().shape, np.int32)
  lowered = programs.evaluate.lower(
    programs.rounds.replicas.abstract(shapes, None), batches
  )
  text: Any = lowered.compile().as_text()
  kernels = re.findall(r"f32\[(\d+),(?:64|172),(?:64|172)\]", text)
  assert kernels and max(map(int, kernels)) == 2
  # Nothing else is collected than the embedding and the head.
  assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 2
  # One activation [T, D] travels in a tick.
  sent = re.findall(r"= (\S+) collective-permute", text)
  assert len(sent) == 1 and sent[0].startswith("f32[32,64]")


TIED = {"tied_head": True, "positions": "learned", "num_positions": 16}


@pytest.mark.parametrize("model", [{"loss_chunk_tokens": 7}, *slow(TIED)])
def test_shards_divide_the_tables_and_keep_documents_apart(model):
  """192 tokens of which each of two shards has 96; token 0 ends a document."""
  shape = (2, 8, runs.SEQUENCE_LENGTH + 1)
  batches = np.random.default_rng(2).integers(0, 192, shape, np.int32)
  batches[..., 5] = 0
  found = []
  for layout, mesh in (
    ("stacked", {}),
    ("mesh", {"num_stages": 2, "num_data_shards": 2}),
  ):
    config = _of_stages(layout, **mesh)
    sizes = dataclasses.replace(config.model, vocab_size=192, **model)
    config = dataclasses.replace(config, model=sizes)
    programs = build.programs(config, end_of_text=0)
    replicas = programs.rounds.replicas
    params = jax.jit(programs.model.init)(jax.random.key(0))
    placed = replicas.place_state(params, None)
    program = jax.jit(replicas.map(programs.steps.gradient, (None, 0), 0))
    own, both = (replicas.place(batches, axis) for axis in (0, None))
    compiled = program.lower(placed, own).compile()
    seen = programs.evaluate(placed, both)
    found.append((compiled(placed, own), seen))
  text: Any = compiled.as_text()
  assert "[96,64]" in text
  assert "[192,64]" not in text and "[64,192]" not in text
  chex.assert_trees_all_close(found[1], found[0], rtol=1e-4, atol=1e-6)
  joined = runs.programs(config).evaluate(placed, both)
  assert abs(float(joined) - float(seen)) > 1e-4


def _own_gradient(remat, platform="cpu"):
  config = runs.settings(method="diloco", model={"remat": remat})
  programs = build.programs(config, runs.TINY, platform=platform)
  return programs.steps.gradient


def test_a_model_that_is_passed_in_computes_again_what_is_asked_for():
  model: Any = runs.TINY.model
  params = model.init(jax.random.key(0))
  tokens = jnp.asarray(_validation()[0])
  expected = jax.value_and_grad(model.loss)(params, tokens)
  seen = {}
  for remat in ("auto", "none", "dots", "full"):
    gradient = _own_gradient(remat)
    chex.assert_trees_all_close(
      jax.jit(gradient)(params, tokens), expected, rtol=1e-6, atol=1e-7
    )
    text = str(jax.make_jaxpr(gradient)(params, tokens))
    seen[remat] = text.count(" dot_general["), text.count(" tanh ")
  # Two products forward, four backward. The last one is not needed again by
  # its own gradient, but by the tanh behind it.
  assert seen["auto"] == seen["none"] == (6, 2)
  assert seen["dots"] == (6, 4)
  assert seen["full"] == (8, 4)


@pytest.mark.parametrize("num_stages", [2, *slow(3)])
def test_layers_that_are_collected_one_by_one_need_less_memory(num_stages):
  """Losses and gradients stay; three stages of eight layers are uneven."""
  batches = _validation()[:2]
  values = {}
  sizes = {}
  for gather in ("stage", "layer"):
    config = _of_stages(num_stages=num_stages, num_data_shards=2, gather=gather)
    programs = runs.programs(config)
    replicas = programs.rounds.replicas
    params = jax.jit(programs.model.init)(jax.random.key(0))
    placed = replicas.place_state(params, None)
    rows = replicas.place(batches, 0)
    program = jax.jit(replicas.map(programs.steps.gradient, (None, 0), 0))
    compiled = program.lower(placed, rows).compile()
    validation = replicas.place(batches, None)
    values[gather] = (
      compiled(placed, rows),
      programs.evaluate(placed, validation),
    )
    memory: Any = compiled.memory_analysis()
    sizes[gather] = memory.temp_size_in_bytes
  chex.assert_trees_all_close(
    values["layer"], values["stage"], rtol=1e-6, atol=1e-6
  )
  assert sizes["layer"] < 0.8 * sizes["stage"]
