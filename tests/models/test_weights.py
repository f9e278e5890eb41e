"""Checkpoints of other libraries, against models written out by hand."""

import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.models import families, weights
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.presets import MODEL_PRESETS, nano
from dilocox_jax.plan.model.shapes import ModelShape, parameter_count
from dilocox_jax.trees import leaves_by_path
from tests.oracles.transformer import stretched

TOLERANCE = 1e-4  # Of logits, fp32 against float64.
SMALL = ModelShape(2, 16, 4, 24, 60)
OPT = {"activation": "relu", "biases": "all", "norm": "layer"}
OPT |= {"positions": "learned", "num_positions": 12, "norm_epsilon": 1e-5}
SHAPES = {
  "opt": dataclasses.replace(SMALL, tied_head=True, **OPT),  # pyright: ignore
  "llama": dataclasses.replace(SMALL, num_kv_heads=2, rope_base=5e5),
  "llama 3.1": dataclasses.replace(SMALL, rope_base=5e5, rope_factor=8.0),
  "qwen2": dataclasses.replace(
    SMALL, num_kv_heads=1, biases="qkv", norm_epsilon=1e-5, head_dim=8
  ),
  "qwen3": dataclasses.replace(
    SMALL,
    num_kv_heads=2,
    qk_norm=True,
    head_dim=8,
    rope_base=1e6,
    tied_head=True,
  ),
}
ROOT = pathlib.Path(__file__).parents[2]
PUBLISHED = json.loads(
  (ROOT / "third_party/model_sizes.json").read_text("utf-8")
)
EVERY_SHAPE = pytest.mark.parametrize("name", SHAPES)
TOKENS = np.asarray([[3, 1, 4, 1, 5, 9, 2, 6], [59, 0, 7, 7, 8, 20, 11, 30]])


def drawn(shape):
  """Parameters far from their start, so that every tensor counts."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(build_model(shape).init, jax.random.key(0))
  return jax.tree.map(
    lambda x: np.float32(0.3 * rng.normal(size=x.shape)), shapes
  )


def logits_of(shape, params):
  return np.asarray(jax.jit(build_model(shape).apply)(params, TOKENS))


def rotation_speeds(config, width):
  """Angle per position of each pair of features of a head."""
  speeds = config["rope_theta"] ** -(np.arange(0, width, 2) / width)
  factor = (config.get("rope_scaling") or {}).get("factor", 1.0)
  return [stretched(speed, factor) for speed in speeds]


def by_hand(family, tensors, config):
  """Logits of a checkpoint, from its own names of tensors and sizes."""
  w = {name: x.astype(np.float64) for name, x in tensors.items()}
  is_opt = family == "opt"
  root = "model.decoder" if is_opt else "model"
  heads = config["num_attention_heads"]
  width = config["hidden_size"]
  k = config.get("head_dim", width // heads)
  first_norm = "self_attn_layer_norm" if is_opt else "input_layernorm"
  ff_norm = "final_layer_norm" if is_opt else "post_attention_layernorm"

  def linear(x, name):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

  def norm(x, name):
    if is_opt:
      x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])
    return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)

  def turned(x):  # [L, heads, k]
    if is_opt:
      return x
    angle = np.outer(np.arange(len(x)), rotation_speeds(config, k))[:, None]
    a = x[..., : k // 2]
    b = x[..., k // 2 :]
    cos = np.cos(angle)
    sin = np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  def layer(x, at):
    y = norm(x, f"{at}.{first_norm}")
    q, h, v = (
      linear(y, f"{at}.self_attn.{name}_proj").reshape(len(x), -1, k)
      for name in "qkv"
    )
    if f"{at}.self_attn.q_norm.weight" in w:
      q = norm(q, f"{at}.self_attn.q_norm")
      h = norm(h, f"{at}.self_attn.k_norm")
    q = turned(q)
    h = turned(h)
    h, v = (np.repeat(t, heads // t.shape[1], axis=1) for t in (h, v))
    scores = np.einsum("lnk,mnk->nlm", q, h) / np.sqrt(k)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    mixed = np.einsum("nlm,mnk->lnk", weight, v).reshape(len(x), -1)
    x = x + linear(mixed, f"{at}.self_attn.{'out' if is_opt else 'o'}_proj")
    y = norm(x, f"{at}.{ff_norm}")
    if is_opt:
      return x + linear(np.maximum(linear(y, f"{at}.fc1"), 0), f"{at}.fc2")
    gate = linear(y, f"{at}.mlp.gate_proj")
    hidden = gate / (1 + np.exp(-gate)) * linear(y, f"{at}.mlp.up_proj")
    return x + linear(hidden, f"{at}.mlp.down_proj")

  rows = []
  for tokens in TOKENS:
    x = w[f"{root}.embed_tokens.weight"][tokens]
    if is_opt:
      x = x + w[f"{root}.embed_positions.weight"][2 : 2 + len(tokens)]
    for number in range(config["num_hidden_layers"]):
      x = layer(x, f"{root}.layers.{number}")
    x = norm(x, f"{root}.final_layer_norm" if is_opt else f"{root}.norm")
    head = "lm_head" if "lm_head.weight" in w else f"{root}.embed_tokens"
    rows.append(x @ w[f"{head}.weight"].T)
  return np.stack(rows)


@EVERY_SHAPE
def test_a_family_is_written_and_read_and_computes_what_it_should(
  name, tmp_path
):
  shape = SHAPES[name]
  family = families.family_of(shape)
  params = drawn(shape)
  tensors = dict(weights.tensors_of(params, shape, family))
  weights.write_checkpoint(tmp_path, shape, params)
  read_shape, again = weights.read_checkpoint(tmp_path)
  assert read_shape == shape
  assert jax.tree.structure(again) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, again, params)
  config = json.loads(json.dumps(families.config_of(shape, family)))
  assert families.shape_of(config) == shape
  assert families.family_of(shape) == family
  config.setdefault("rms_norm_eps", 1e-5)
  expected = by_hand(family, tensors, config)
  np.testing.assert_allclose(
    logits_of(shape, params), expected, rtol=TOLERANCE, atol=TOLERANCE
  )


@EVERY_SHAPE
def test_logits_are_those_of_transformers(name, tmp_path):
  torch = pytest.importorskip("torch", reason="needs torch (CPU)")
  transformers = pytest.importorskip("transformers")
  family = families.family_of(SHAPES[name])
  config = families.config_of(SHAPES[name], family) | {"init_std": 0.3}
  config |= {"initializer_range": 0.3, "pad_token_id": None}
  torch.manual_seed(0)
  theirs = getattr(transformers, families.FAMILIES[family].architecture)(
    transformers.AutoConfig.for_model(**config)
  ).eval()
  for parameter in theirs.parameters():  # Biases and norms, too.
    parameter.data += 0.1 * torch.randn_like(parameter)
  theirs.save_pretrained(tmp_path / "theirs", safe_serialization=True)
  shape, params = weights.read_checkpoint(tmp_path / "theirs")
  assert shape == SHAPES[name]
  with torch.no_grad():
    expected = theirs(torch.tensor(TOKENS)).logits.numpy()
  np.testing.assert_allclose(
    logits_of(shape, params), expected, rtol=TOLERANCE, atol=TOLERANCE
  )
  # And out again: transformers reads what we write, in one file or several.
  for limit in (weights.MAX_FILE_BYTES, 4000):
    folder = tmp_path / str(limit)
    folder.mkdir()
    assert weights.write_checkpoint(folder, shape, params, limit) == family
    read = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
      again = read.eval()(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(again, expected, rtol=TOLERANCE, atol=TOLERANCE)
  assert len(list(folder.glob("*.safetensors"))) > 1


STRETCHED = PUBLISHED["llama3_1_8b"]["config"]["rope_scaling"]


def rope_scaling(values):
  """Changes a config to an older one, without `rope_parameters`."""
  return {"rope_parameters": None, "rope_scaling": values}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_model_of_the_published_config(name):
  published = PUBLISHED[name]
  preset = MODEL_PRESETS[name]
  assert families.shape_of(published["config"]) == preset
  assert parameter_count(preset) == published["parameters"]
  family = published["config"]["model_type"]
  assert families.family_of(preset) == family
  assert families.shape_of(families.config_of(preset, family)) == preset


def refused(match, function, *arguments):
  with pytest.raises(ValueError, match=match) as error:
    function(*arguments)
  assert "\n" not in str(error.value)


def test_what_our_model_does_not_compute_is_refused():
  for family, changes, message in (
    ("llama", {"model_type": "gpt2"}, "family 'gpt2' cannot be read: have opt"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not computed"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
    ("llama", rope_scaling({"type": "linear"}), "rope_type='linear'"),
    ("qwen2", rope_scaling(STRETCHED | {"factor": "8"}), "factor='8'"),
    ("llama", rope_scaling(STRETCHED | {"factor": 0.5}), "rope_factor=0.5"),
    (
      "llama",
      rope_scaling(STRETCHED | {"high_freq_factor": 2.0}),
      "high_freq_factor=2.0 is not computed",
    ),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "full_attention"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 1}}, "partial"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
  ):
    config = families.config_of(SHAPES[family], family)
    refused(message, families.shape_of, config | changes)
  config = families.config_of(SHAPES["llama"], "llama")
  del config["hidden_size"]
  refused("config.json has no hidden_size", families.shape_of, config)
  gelu = dataclasses.replace(nano, activation="gelu")
  refused("no family of opt, llama, qwen2, qwen3 has", families.family_of, gelu)
  for name, family in (("opt_1_3b", "opt"), ("tiny", "llama")):
    assert families.family_of(MODEL_PRESETS[name]) == family


def test_a_checkpoint_of_another_family_is_one_line(tmp_path):
  numpy_files = pytest.importorskip("safetensors.numpy")
  shape = SHAPES["llama"]
  tensors = dict(weights.tensors_of(drawn(shape), shape, "llama"))
  longer = dataclasses.replace(shape, vocab_size=61)
  bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(16)}
  for said, checkpoint, read_shape, family in (
    ("no opt: it lacks model.decoder.emb", tensors, SHAPES["opt"], "opt"),
    ("no llama: what is 'model.layers.0.s", tensors | bias, shape, "llama"),
    (r"shape \(60, 16\), but by its config", tensors, longer, "llama"),
  ):
    config = families.config_of(read_shape, family)
    weights.save_json(tmp_path / "config.json", config)
    numpy_files.save_file(checkpoint, tmp_path / "model.safetensors")
    refused(said, weights.open_checkpoint, tmp_path)


@EVERY_SHAPE
def test_parts_of_a_parameter_are_read_from_the_file(name, tmp_path):
  shape = SHAPES[name]
  params = drawn(shape)
  weights.write_checkpoint(tmp_path, shape, params)
  checkpoint = weights.open_checkpoint(tmp_path)
  for path, leaf in leaves_by_path(params).items():
    half = tuple(slice(size // 2, size) for size in leaf.shape)
    first = (slice(0, 1), *[slice(None)] * (leaf.ndim - 1))
    for index in (half, first):
      np.testing.assert_array_equal(checkpoint.part(path, index), leaf[index])


def test_narrow_files_are_read_and_damaged_ones_are_one_line(
  tmp_path, monkeypatch
):
  config = tmp_path / "config.json"
  assert not weights.is_checkpoint(tmp_path)
  config.write_text(json.dumps({"model_type": "gpt2"}))
  refused("family 'gpt2' cannot be read", weights.read_checkpoint, tmp_path)
  config.write_text(json.dumps(families.config_of(SHAPES["opt"], "opt")))
  assert weights.is_checkpoint(tmp_path)
  refused("has no .safetensors file", weights.read_checkpoint, tmp_path)
  numpy_files = pytest.importorskip("safetensors.numpy")
  weights.write_checkpoint(tmp_path, SHAPES["llama"], drawn(SHAPES["llama"]))
  file = tmp_path / "model.safetensors"
  half = numpy_files.load_file(file)
  half = {name: x.astype(jnp.bfloat16) for name, x in half.items()}
  numpy_files.save_file(half, file)
  _, params = weights.read_checkpoint(tmp_path)
  assert params["head"]["kernel"].dtype == np.float32
  for size in (500, 0):
    with file.open("r+b") as opened:
      opened.truncate(size)
    refused("is damaged .*: copy it", weights.read_checkpoint, tmp_path)
  monkeypatch.setitem(sys.modules, "safetensors", None)
  refused(r"dilocox_jax\[weights\]", weights.read_checkpoint, tmp_path)
