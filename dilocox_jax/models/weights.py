"""Reads and writes checkpoints of OPT, Llama and Qwen2 as others keep them.

A folder has a `config.json` and one or more `.safetensors` files, the form of
the library `transformers`. A family is a row of `FAMILIES`: names of tensors,
names of sizes, and the options that all of its models share. Files need the
extra `weights` (`pip install 'dilocox_jax[weights]'`), imported when used.
"""

import json
import pathlib
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dilocox_jax import files
from dilocox_jax.checks import json_file, of_type, require, shown
from dilocox_jax.models.tensor_files import (
  TENSORS_FILE,
  check_alone,
  read_tensors,
  write_tensors,
)
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.trees import leaves_by_path, nested

CONFIG_FILE = "config.json"
_HEAD = "lm_head.weight"
# What a module's leaves are called in a checkpoint. Their kernels are
# [outputs, inputs], ours [inputs, outputs].
_LEAVES = {
  "kernel": "weight",
  "scale": "weight",
  "bias": "bias",
  "embedding": "weight",
  "positions": "weight",
}


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
# Values that were made smaller need more tensors to be read.
_UNCHANGED = {"quantization_config": None}
_LLAMA_EXPECTED = _UNCHANGED | {
  "hidden_act": "silu",
  "rope_scaling": None,
  "rope_type": "default",
}
# Other fields turn a part of each head alone, or name types of layers.
_ROPE_FIELDS = ("rope_theta", "rope_type")
FAMILIES: Mapping[str, Family] = {
  "opt": Family(
    architecture="OPTForCausalLM",
    options={
      "activation": "relu",
      "positions": "learned",
      "norm": "layer",
      "biases": "all",
      "norm_epsilon": 1e-5,
    },
    sizes=_SIZES
    | {"ff_dim": "ffn_dim", "num_positions": "max_position_embeddings"},
    modules=_OPT_MODULES,
    expected=_UNCHANGED
    | {"activation_function": "relu", "do_layer_norm_before": True},
    first_position=2,
  ),
  "llama": Family(
    architecture="LlamaForCausalLM",
    options={"biases": "none"},
    sizes=_LLAMA_SIZES,
    modules=_LLAMA_MODULES,
    expected=_LLAMA_EXPECTED,
  ),
  "qwen2": Family(
    architecture="Qwen2ForCausalLM",
    options={"biases": "qkv"},
    sizes=_LLAMA_SIZES,
    modules=_LLAMA_MODULES,
    expected=_LLAMA_EXPECTED | {"use_sliding_window": False},
  ),
}
# Where config.json leaves a size out: OPT ties its head, the others do not.
_DEFAULTS = {"head_dim": 0, "rope_base": 10_000.0, "num_kv_heads": 0}


def is_checkpoint(folder: pathlib.Path) -> bool:
  """Whether a folder has a config.json that names a family.

  Raises:
    ValueError: One line, if its config.json cannot be read.
  """
  path = folder / CONFIG_FILE
  return path.exists() and "model_type" in json_file(path)


def read_checkpoint(folder: pathlib.Path) -> tuple[ModelShape, dict[str, Any]]:
  """Reads a checkpoint.

  Args:
    folder: Folder with config.json and .safetensors files.

  Returns:
    Sizes of the model, and its parameters in fp32 as a nested dict.

  Raises:
    ValueError: One line, if it is of another family, lacks a tensor, a file is
      damaged, or a value is not finite.
  """
  values = json_file(folder / CONFIG_FILE)
  shape = shape_of(values)
  tensors = read_tensors(folder)
  return shape, params_of(tensors, shape, values["model_type"])


def write_checkpoint(
  folder: pathlib.Path, shape: ModelShape, params: Any
) -> str:
  """Writes a checkpoint; returns the name of its family.

  Args:
    folder: Folder, which exists. A checkpoint that was written into it before
      is replaced.
    shape: Sizes of the model.
    params: Its parameters, a nested dict.

  Raises:
    ValueError: One line, if no family has a model of this shape, or the folder
      has files of another checkpoint.
  """
  family = family_of(shape)
  check_alone(folder, {CONFIG_FILE, TENSORS_FILE})
  _check_config_is_ours(folder / CONFIG_FILE)
  # Without its config a folder is no checkpoint. So a kill leaves none that has
  # the sizes of one model and the tensors of another.
  (folder / CONFIG_FILE).unlink(missing_ok=True)
  write_tensors(folder / TENSORS_FILE, tensors_of(params, shape, family))
  save_json(folder / CONFIG_FILE, config_of(shape, family))
  return family


def _check_config_is_ours(path: pathlib.Path) -> None:
  """Refuses to replace a config.json that is none of a checkpoint.

  Other programs give that name to their settings, too, and so do runs.

  Raises:
    ValueError: One line that names the file.
  """
  if not path.exists():
    return
  try:
    is_ours = "model_type" in json_file(path)
  except ValueError:
    is_ours = False
  require(
    is_ours,
    f"{path} is not the config of a checkpoint, and would be replaced: take an "
    "empty folder",
  )


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
    f"a checkpoint of the family {shown(name)} cannot be read: have "
    f"{', '.join(FAMILIES)}",
  )
  family = FAMILIES[name]
  rope = values.get("rope_parameters") or {}
  rope = of_type("config.json: rope_parameters", rope, dict)
  values = {**values, **rope}
  for field, known in family.expected.items():
    found = values.get(field, known)
    require(
      found == known,
      f"config.json: {field}={shown(found)} is not computed here, only "
      f"{known!r}",
    )
  for field in rope:
    require(
      field in _ROPE_FIELDS,
      f"config.json: rope_parameters has {shown(field)}, which is not computed "
      f"here, only {' and '.join(_ROPE_FIELDS)}",
    )
  defaults = _DEFAULTS | {"tied_head": name == "opt"}
  needed = {t for o, t in family.sizes.items() if o not in defaults}
  missing = min(needed - values.keys(), default="")
  require(not missing, f"config.json has no {missing}")
  types = typing.get_type_hints(ModelShape)
  sizes: dict[str, Any] = {}
  for ours, theirs in family.sizes.items():
    value = values.get(theirs)
    if value is None and ours in defaults:
      value = defaults[ours]
    sizes[ours] = of_type(f"config.json: {theirs}", value, types[ours])
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
  first_position = FAMILIES[name].first_position
  for path, size in shape.parameter_shapes.items():
    is_stacked = path.startswith("blocks/")
    rows = first_position if path == "embed/positions" else 0
    leaves = []
    for key in _keys(path, shape, name):
      require(key in tensors, f"the checkpoint is no {name}: it lacks {key}")
      unread.discard(key)
      stored = size[1:] if is_stacked else (size[0] + rows, *size[1:])
      leaf = _values(key, tensors[key], _stored_shape(path, stored))
      leaves.append(_turned(path, leaf))
    params[path] = np.stack(leaves) if is_stacked else leaves[0][rows:]
  if shape.tied_head and _HEAD in unread:
    embedding = params["embed/embedding"]
    require(
      np.array_equal(
        _values(_HEAD, tensors[_HEAD], embedding.shape), embedding
      ),
      f"config.json says that head and embedding are one, but {_HEAD} is not "
      "the embedding: copy both again",
    )
    unread.discard(_HEAD)
  unknown = min(unread, default="")
  require(not unread, f"the checkpoint is no {name}: what is {shown(unknown)}?")
  return nested(params)


def _stored_shape(path: str, size: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape that one of our leaves has in a checkpoint."""
  return size[::-1] if path.endswith("/kernel") else size


def _values(key: str, tensor: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
  """Returns the values of a tensor in fp32.

  Args:
    key: Its name, for messages.
    tensor: The tensor in any floating type.
    size: Shape that it should have.

  Raises:
    ValueError: One line, if it is another one, or not finite.
  """
  require(
    tensor.shape == size,
    f"the tensor {key} has the shape {tensor.shape}, but by its config.json "
    f"{size}",
  )
  require(
    jnp.issubdtype(tensor.dtype, jnp.floating),
    f"the tensor {key} has the type {tensor.dtype}, and not that of a weight: "
    "convert the checkpoint to floats",
  )
  with np.errstate(over="ignore"):  # It becomes infinite, which is refused.
    values = np.asarray(tensor, np.float32)
  require(
    bool(np.isfinite(values).all()),
    f"the tensor {key} has values that are not finite: the checkpoint is "
    "damaged; copy it again",
  )
  return values


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


def _keys(path: str, shape: ModelShape, name: str) -> Iterator[str]:
  """Yields the names of a leaf's tensors: one, or one for each layer.

  A damaged config may say that there are a billion layers. The first name that
  the files lack ends the search.
  """
  module, _, leaf = path.rpartition("/")
  modules = FAMILIES[name].modules
  key = f"{modules.get(path) or modules[module]}.{_LEAVES[leaf]}"
  is_stacked = path.startswith("blocks/")
  for number in range(shape.num_layers if is_stacked else 1):
    yield key.format(number)


def _turned(path: str, leaf: np.ndarray) -> np.ndarray:
  return leaf.T if path.endswith("/kernel") else leaf
