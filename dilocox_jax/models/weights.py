"""Reads and writes checkpoints of OPT, Llama and Qwen2 as others keep them.

A folder has a `config.json` and one or more `.safetensors` files, the form of
the library `transformers`. A family is a row of `FAMILIES`: names of tensors,
names of sizes, and the options that all of its models share. Files need the
extra `weights` (`pip install 'dilocox_jax[weights]'`), imported when used.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax import files
from dilocox_jax.checks import extra_package, json_object, require
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.trees import leaves_by_path, nested

CONFIG_FILE, TENSORS_FILE = "config.json", "model.safetensors"
# What a module's leaves are called in a checkpoint. Their kernels are
# [outputs, inputs], ours [inputs, outputs].
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_LEAVES |= {"embedding": "weight", "positions": "weight"}


class Family(NamedTuple):
  """How checkpoints of a family differ from ours.

  Attributes:
    architecture: Name of the class in `transformers`.
    options: Fields of `ModelShape` that all its models share.
    sizes: The field of config.json for every other field of `ModelShape`.
    modules: Name of every module; "{}" stands for the layer.
    expected: Fields of config.json that say what is computed, with the only
      value that our model computes; a missing one has it.
    first_position: Row of position 0 in the table of positions.
  """

  architecture: str
  options: Mapping[str, Any]
  sizes: Mapping[str, str]
  modules: Mapping[str, str]
  expected: Mapping[str, Any]
  first_position: int = 0


_SIZES = {
  "num_layers": "num_hidden_layers",
  "model_dim": "hidden_size",
  "num_heads": "num_attention_heads",
  "vocab_size": "vocab_size",
  "tied_head": "tie_word_embeddings",
}
_LLAMA_SIZES = _SIZES | {
  "ff_dim": "intermediate_size",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "norm_epsilon": "rms_norm_eps",
  "rope_base": "rope_theta",
}
_LLAMA_MODULES = {
  "embed/embedding": "model.embed_tokens",
  "final_norm": "model.norm",
  "head": "lm_head",
  "blocks/attention/norm": "model.layers.{}.input_layernorm",
  "blocks/attention/query": "model.layers.{}.self_attn.q_proj",
  "blocks/attention/key": "model.layers.{}.self_attn.k_proj",
  "blocks/attention/value": "model.layers.{}.self_attn.v_proj",
  "blocks/attention/output": "model.layers.{}.self_attn.o_proj",
  "blocks/mlp/norm": "model.layers.{}.post_attention_layernorm",
  "blocks/mlp/gate": "model.layers.{}.mlp.gate_proj",
  "blocks/mlp/up": "model.layers.{}.mlp.up_proj",
  "blocks/mlp/down": "model.layers.{}.mlp.down_proj",
}
_OPT_MODULES = {
  "embed/embedding": "model.decoder.embed_tokens",
  "embed/positions": "model.decoder.embed_positions",
  "final_norm": "model.decoder.final_layer_norm",
  "head": "lm_head",
  "blocks/attention/norm": "model.decoder.layers.{}.self_attn_layer_norm",
  "blocks/attention/query": "model.decoder.layers.{}.self_attn.q_proj",
  "blocks/attention/key": "model.decoder.layers.{}.self_attn.k_proj",
  "blocks/attention/value": "model.decoder.layers.{}.self_attn.v_proj",
  "blocks/attention/output": "model.decoder.layers.{}.self_attn.out_proj",
  "blocks/mlp/norm": "model.decoder.layers.{}.final_layer_norm",
  "blocks/mlp/up": "model.decoder.layers.{}.fc1",
  "blocks/mlp/down": "model.decoder.layers.{}.fc2",
}
_LLAMA_EXPECTED = {
  "hidden_act": "silu",
  "rope_scaling": None,
  "rope_type": "default",
}
_OPT = {"activation": "relu", "positions": "learned", "norm": "layer"}
_OPT |= {"biases": "all", "norm_epsilon": 1e-5}
FAMILIES: Mapping[str, Family] = {
  "opt": Family(
    "OPTForCausalLM",
    _OPT,
    _SIZES | {"ff_dim": "ffn_dim", "num_positions": "max_position_embeddings"},
    _OPT_MODULES,
    {"activation_function": "relu", "do_layer_norm_before": True},
    first_position=2,
  ),
  "llama": Family(
    *("LlamaForCausalLM", {"biases": "none"}),
    *(_LLAMA_SIZES, _LLAMA_MODULES, _LLAMA_EXPECTED),
  ),
  "qwen2": Family(
    *("Qwen2ForCausalLM", {"biases": "qkv"}, _LLAMA_SIZES, _LLAMA_MODULES),
    _LLAMA_EXPECTED | {"use_sliding_window": False},
  ),
}
# Where config.json leaves a size out: OPT ties its head, the others do not.
_DEFAULTS = {"head_dim": 0, "rope_base": 10_000.0, "num_kv_heads": 0}


def is_checkpoint(folder: pathlib.Path) -> bool:
  """Whether a folder has a config.json that names a family."""
  path = folder / CONFIG_FILE
  return path.is_file() and "model_type" in json_object(path.read_bytes(), path)


def read_checkpoint(folder: pathlib.Path) -> tuple[ModelShape, dict[str, Any]]:
  """Reads a checkpoint.

  Args:
    folder: Folder with config.json and .safetensors files.

  Returns:
    Sizes of the model, and its parameters in fp32 as a nested dict.

  Raises:
    ValueError: One line, if it is of another family, lacks a tensor, or a file
      is damaged.
  """
  path = folder / CONFIG_FILE
  values = json_object(path.read_bytes(), path)
  shape = shape_of(values)
  found = sorted(folder.glob("*.safetensors"))
  require(bool(found), f"{folder} has no .safetensors file")
  tensors: dict[str, np.ndarray] = {}
  for file in found:
    tensors |= _loaded(file)
  return shape, params_of(tensors, shape, values["model_type"])


def _loaded(file: pathlib.Path) -> dict[str, np.ndarray]:
  library = _safetensors()
  damage = extra_package("safetensors", str(file), "weights").SafetensorError
  try:
    return library.load_file(file)
  except damage as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f"{file} is damaged ({reason}): copy it again") from error


def write_checkpoint(
  folder: pathlib.Path, shape: ModelShape, params: Any
) -> str:
  """Writes a checkpoint; returns the name of its family.

  Args:
    folder: Folder, which exists.
    shape: Sizes of the model.
    params: Its parameters, a nested dict.

  Raises:
    ValueError: One line, if no family has a model of this shape.
  """
  family = family_of(shape)
  save(folder / TENSORS_FILE, tensors_of(params, shape, family))
  save_json(folder / CONFIG_FILE, config_of(shape, family))
  return family


def save(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes tensors for PyTorch, with the mode that other files get."""
  with files.replaced(path) as file:
    mode = os.stat(file.name).st_mode
    _safetensors().save_file(tensors, file.name, {"format": "pt"})
    os.chmod(file.name, mode)  # The library lets its owner alone in.


def save_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes the settings beside tensors."""
  with files.replaced(path) as file:
    file.write(json.dumps(values, indent=2).encode() + b"\n")


def shape_of(values: Mapping[str, Any]) -> ModelShape:
  """Returns the sizes that a config.json describes.

  Raises:
    ValueError: One line, if our model does not compute what it describes.
  """
  name = str(values.get("model_type"))
  require(
    name in FAMILIES,
    f"a checkpoint of the family {name!r} cannot be read: have "
    f"{', '.join(FAMILIES)}",
  )
  family = FAMILIES[name]
  values = {**values, **(values.get("rope_parameters") or {})}
  for field, known in family.expected.items():
    require(
      values.get(field, known) == known,
      f"config.json: {field}={values.get(field)!r} is not computed here, only "
      f"{known!r}",
    )
  defaults = _DEFAULTS | {"tied_head": name == "opt"}
  needed = {t for o, t in family.sizes.items() if o not in defaults}
  missing = min(needed - values.keys(), default="")
  require(not missing, f"config.json has no {missing}")
  sizes: dict[str, Any] = {
    ours: defaults[ours] if values.get(theirs) is None else values[theirs]
    for ours, theirs in family.sizes.items()
  }
  # A size that follows from the others is left to them, as in presets.
  if sizes.get("num_kv_heads") == sizes["num_heads"]:
    sizes["num_kv_heads"] = 0
  if sizes.get("head_dim", 0) * sizes["num_heads"] == sizes["model_dim"]:
    sizes["head_dim"] = 0
  return ModelShape(**sizes, **family.options)


def config_of(shape: ModelShape, name: str) -> dict[str, Any]:
  """Returns the config.json of a model of a family.

  Args:
    shape: Sizes of the model.
    name: Name of the family, one of `FAMILIES`.
  """
  family = FAMILIES[name]
  values = {t: getattr(shape, o) for o, t in family.sizes.items()}
  values |= {**family.expected, "model_type": name}
  values |= {"architectures": [family.architecture]}
  values |= {"torch_dtype": "float32"}
  if name == "opt":
    return values | {"word_embed_proj_dim": shape.model_dim}
  values["head_dim"] = shape.head_width
  values["num_key_value_heads"] = shape.kv_heads
  base = {"rope_theta": shape.rope_base, "rope_type": values.pop("rope_type")}
  return values | {"rope_parameters": base}


def family_of(shape: ModelShape) -> str:
  """Returns the family of a model's options.

  Raises:
    ValueError: One line, if there is none.
  """
  usual = vars(ModelShape(1, 2, 1, 1, 1))
  for name, family in FAMILIES.items():
    free = family.sizes.keys()
    options = {k: v for k, v in usual.items() if k not in free}
    options |= family.options
    is_like = all(getattr(shape, k) == v for k, v in options.items())
    if is_like and type(shape) is ModelShape:
      return name
  raise ValueError(
    f"no family of {', '.join(FAMILIES)} has a model like {shape}: it cannot "
    "be exported"
  )


def params_of(
  tensors: Mapping[str, np.ndarray], shape: ModelShape, name: str
) -> dict[str, Any]:
  """Returns parameters, a nested dict in fp32, from a checkpoint's tensors.

  Args:
    tensors: Tensors of the checkpoint, by the family's names.
    shape: Sizes of the model.
    name: Name of the family, one of `FAMILIES`.

  Raises:
    ValueError: One line, if a tensor is missing, left over, or of other sizes.
  """
  params: dict[str, np.ndarray] = {}
  unread = {key for key in tensors if not key.endswith("rotary_emb.inv_freq")}
  unread -= {"lm_head.weight"} if shape.tied_head else set()
  for path, size in shape.parameter_shapes.items():
    keys = _keys(path, shape, name)
    missing = next((key for key in keys if key not in tensors), None)
    require(missing is None, f"the checkpoint is no {name}: it lacks {missing}")
    unread -= set(keys)
    leaves = [_turned(path, np.asarray(tensors[k], np.float32)) for k in keys]
    leaf = np.stack(leaves) if path.startswith("blocks/") else leaves[0]
    if path == "embed/positions":
      leaf = leaf[FAMILIES[name].first_position :]
    require(
      leaf.shape == size,
      f"{keys[0]} of the checkpoint gives {path} the shape {leaf.shape}, but "
      f"its config.json {size}",
    )
    params[path] = leaf
  require(
    not unread,
    f"the checkpoint is no {name}: what is {min(unread, default='')}?",
  )
  return nested(params)


def tensors_of(
  params: Any, shape: ModelShape, name: str
) -> dict[str, np.ndarray]:
  """Returns a checkpoint's tensors from parameters; reverses `params_of`.

  Args:
    params: Parameters as a nested dict.
    shape: Sizes of the model.
    name: Name of the family, one of `FAMILIES`.
  """
  tensors, by_path = {}, leaves_by_path(params)
  for path in shape.parameter_shapes:
    leaf = np.asarray(by_path[path])
    if path == "embed/positions":
      # Nothing reads the rows in front of the first position.
      leaf = np.pad(leaf, ((FAMILIES[name].first_position, 0), (0, 0)))
    leaves = leaf if path.startswith("blocks/") else leaf[None]
    for key, one in zip(_keys(path, shape, name), leaves, strict=True):
      tensors[key] = np.ascontiguousarray(_turned(path, one))
  return tensors


def _keys(path: str, shape: ModelShape, name: str) -> list[str]:
  """Returns the names of a leaf's tensors: one, or one for each layer."""
  module, _, leaf = path.rpartition("/")
  modules = FAMILIES[name].modules
  key = f"{modules.get(path) or modules[module]}.{_LEAVES[leaf]}"
  is_stacked = path.startswith("blocks/")
  return [key.format(n) for n in range(shape.num_layers if is_stacked else 1)]


def _turned(path: str, leaf: np.ndarray) -> np.ndarray:
  return leaf.T if path.endswith("/kernel") else leaf


def _safetensors() -> ModuleType:
  needed_by = "a checkpoint of another library"
  return extra_package("safetensors.numpy", needed_by, "weights")
