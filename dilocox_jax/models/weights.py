"""Reads and writes checkpoints of OPT, Llama and Qwen2 for `transformers`.

A checkpoint is a folder with a `config.json` and one or more `.safetensors`
files, as the library `transformers` writes and reads them. Each family of
models is a row of `FAMILIES`: the names of its tensors, the names of its sizes,
and the options that all of its models have in common. The `.safetensors` files
need the extra `weights` (`pip install 'dilocox_jax[weights]'`), which is
imported only when such a file is read or written.
"""

import dataclasses
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
# Leaf of the built-in decoder that holds the table of learned positions.
_POSITIONS = "embed/positions"
# Tensor of the head. A checkpoint with a tied head may have it too.
_HEAD_TENSOR = "lm_head.weight"
# Older checkpoints hold the frequencies of rotary positions. They are not read,
# because the decoder computes them from the base.
_FREQUENCIES_SUFFIX = "rotary_emb.inv_freq"
# End of a tensor's name in a checkpoint, by the last key of the leaf's path.
_TENSOR_ENDS = {
  "kernel": "weight",
  "scale": "weight",
  "bias": "bias",
  "embedding": "weight",
  "positions": "weight",
}


class Family(NamedTuple):
  """How the checkpoints of a family differ from the built-in decoder.

  Attributes:
    architecture: Name of the model's class in `transformers`.
    shape_options: Values of the fields of `ModelShape` that are the same for
      all models of the family.
    size_keys: Keys of config.json by field of `ModelShape`, for the fields that
      differ between models of the family. All other fields have their defaults.
    module_names: Names of the modules in a checkpoint, by path of the module in
      the built-in decoder. "{}" stands for the number of the layer.
    expected: Keys of config.json that choose what a model computes, with the
      only value that the built-in decoder can compute. A missing key counts as
      that value.
    ties_head: Whether the head is the embedding if config.json does not say so.
    first_position: Row of the table of learned positions that belongs to the
      first token of a sequence. The rows in front of it are not read.
  """

  architecture: str
  shape_options: Mapping[str, Any]
  size_keys: Mapping[str, str]
  module_names: Mapping[str, str]
  expected: Mapping[str, Any]
  ties_head: bool = False
  first_position: int = 0


# Keys of config.json by field of `ModelShape`.
_SIZE_KEYS = {
  "num_layers": "num_hidden_layers",
  "model_dim": "hidden_size",
  "num_heads": "num_attention_heads",
  "vocab_size": "vocab_size",
  "tied_head": "tie_word_embeddings",
}
_LLAMA_SIZE_KEYS = _SIZE_KEYS | {
  "ff_dim": "intermediate_size",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "norm_epsilon": "rms_norm_eps",
  "rope_base": "rope_theta",
}
# Names of modules in a checkpoint, by path of the module here.
_LLAMA_MODULE_NAMES = {
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
_OPT_MODULE_NAMES = {
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
# A quantized checkpoint has more tensors, such as scales, which are not read.
_NOT_QUANTIZED = {"quantization_config": None}
_LLAMA_EXPECTED = _NOT_QUANTIZED | {
  "hidden_act": "silu",
  "rope_scaling": None,
  "rope_type": "default",
}
# Keys that `rope_parameters` may have in config.json. Other keys rotate only a
# part of each head, or differ between layers. The decoder has neither.
_ROPE_KEYS = ("rope_theta", "rope_type")
FAMILIES: Mapping[str, Family] = {
  "opt": Family(
    architecture="OPTForCausalLM",
    shape_options={
      "activation": "relu",
      "positions": "learned",
      "norm": "layer",
      "biases": "all",
      "norm_epsilon": 1e-5,
    },
    size_keys=_SIZE_KEYS
    | {"ff_dim": "ffn_dim", "num_positions": "max_position_embeddings"},
    module_names=_OPT_MODULE_NAMES,
    expected=_NOT_QUANTIZED
    | {"activation_function": "relu", "do_layer_norm_before": True},
    ties_head=True,
    first_position=2,
  ),
  "llama": Family(
    architecture="LlamaForCausalLM",
    shape_options={"biases": "none"},
    size_keys=_LLAMA_SIZE_KEYS,
    module_names=_LLAMA_MODULE_NAMES,
    expected=_LLAMA_EXPECTED,
  ),
  "qwen2": Family(
    architecture="Qwen2ForCausalLM",
    shape_options={"biases": "qkv"},
    size_keys=_LLAMA_SIZE_KEYS,
    module_names=_LLAMA_MODULE_NAMES,
    expected=_LLAMA_EXPECTED | {"use_sliding_window": False},
  ),
}
# Values of the fields whose key config.json may lack. `Family.ties_head` is the
# value of "tied_head".
_DEFAULT_SIZES = {"head_dim": 0, "rope_base": 10_000.0, "num_kv_heads": 0}


def is_checkpoint(folder: pathlib.Path) -> bool:
  """Whether a folder has a config.json that names a family of models.

  The family may be one that cannot be read here.

  Raises:
    ValueError: One line, if config.json is there but cannot be read.
  """
  path = folder / CONFIG_FILE
  return path.exists() and "model_type" in json_file(path)


def read_checkpoint(folder: pathlib.Path) -> tuple[ModelShape, dict[str, Any]]:
  """Reads a checkpoint.

  Args:
    folder: Folder with config.json and .safetensors files.

  Returns:
    Sizes of the model, and its parameters as a nested dict of fp32 arrays.

  Raises:
    ValueError: One line, if a file is missing or damaged, if the built-in
      decoder cannot compute the model, or if the tensors are not those of the
      model (`params_of`).
  """
  config = json_file(folder / CONFIG_FILE)
  shape = shape_of(config)
  tensors = read_tensors(folder)
  return shape, params_of(tensors, shape, config["model_type"])


def write_checkpoint(
  folder: pathlib.Path, shape: ModelShape, params: Any
) -> str:
  """Writes a checkpoint.

  Args:
    folder: Folder to write into, which must exist. A checkpoint that this
      function wrote into it before is replaced.
    shape: Sizes of the model.
    params: Parameters of the model, a nested dict of arrays.

  Returns:
    Name of the family, one of `FAMILIES`.

  Raises:
    ValueError: One line, if no family has a model of this shape, if the folder
      has files of another checkpoint, or if its config.json belongs to another
      program.
  """
  family_name = family_of(shape)
  check_alone(folder, {CONFIG_FILE, TENSORS_FILE})
  config_path = folder / CONFIG_FILE
  _check_replaceable(config_path)
  # A folder without config.json is no checkpoint. So the old config is removed
  # first, and the new one is written last. A program that is killed in between
  # cannot leave the config of one model beside the tensors of another.
  config_path.unlink(missing_ok=True)
  write_tensors(folder / TENSORS_FILE, tensors_of(params, shape, family_name))
  save_json(config_path, config_of(shape, family_name))
  return family_name


def _check_replaceable(config_path: pathlib.Path) -> None:
  """Checks that a config.json may be replaced: it belongs to a checkpoint.

  Other programs, and the runs of this package, also keep their settings in a
  file of this name.

  Args:
    config_path: Path of the file, which may be missing.

  Raises:
    ValueError: One line that names the file.
  """
  if not config_path.exists():
    return
  try:
    belongs_to_checkpoint = "model_type" in json_file(config_path)
  except ValueError:
    belongs_to_checkpoint = False
  require(
    belongs_to_checkpoint,
    f"{config_path} is not the config of a checkpoint, and would be replaced: "
    "take an empty folder",
  )


def save_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes values as JSON, such as the config beside a file of tensors.

  Args:
    path: The file. It is replaced as a whole.
    values: The values by key.
  """
  with files.replaced(path) as file:
    file.write(json.dumps(values, indent=2).encode() + b"\n")


def shape_of(config: Mapping[str, Any]) -> ModelShape:
  """Returns the sizes of the model that a config.json describes.

  Args:
    config: Values of config.json, by key.

  Raises:
    ValueError: One line, if the family is unknown, if a size is missing or
      impossible, or if the built-in decoder does not compute what the config
      describes.
  """
  family_name = str(config.get("model_type"))
  require(
    family_name in FAMILIES,
    f"a checkpoint of the family {shown(family_name)} cannot be read: have "
    f"{', '.join(FAMILIES)}",
  )
  family = FAMILIES[family_name]
  # Newer versions of `transformers` write the keys of rotary positions into
  # `rope_parameters`, and older ones beside the other keys.
  rope = of_type(
    "config.json: rope_parameters", config.get("rope_parameters") or {}, dict
  )
  values = {**config, **rope}
  for key, expected_value in family.expected.items():
    value = values.get(key, expected_value)
    require(
      value == expected_value,
      f"config.json: {key}={shown(value)} is not computed here, only "
      f"{expected_value!r}",
    )
  for key in rope:
    require(
      key in _ROPE_KEYS,
      f"config.json: rope_parameters has {shown(key)}, which is not computed "
      f"here, only {' and '.join(_ROPE_KEYS)}",
    )
  return ModelShape(**_sizes(values, family), **family.shape_options)


def _sizes(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
  """Returns the fields of `ModelShape` that config.json gives.

  Args:
    values: Values of config.json, by key.
    family: The family of the model.

  Returns:
    A value for each field of `family.size_keys`.

  Raises:
    ValueError: One line, if a size is missing or of a wrong type.
  """
  defaults = _DEFAULT_SIZES | {"tied_head": family.ties_head}
  needed_keys = {
    key for field, key in family.size_keys.items() if field not in defaults
  }
  missing_keys = sorted(needed_keys - values.keys())
  if missing_keys:
    raise ValueError(f"config.json has no {missing_keys[0]}")
  types = typing.get_type_hints(ModelShape)
  sizes: dict[str, Any] = {}
  for field, key in family.size_keys.items():
    value = values.get(key)
    if value is None and field in defaults:
      value = defaults[field]
    sizes[field] = of_type(f"config.json: {key}", value, types[field])
  # Config files write these two sizes out. Here and in presets 0 means the
  # usual size, so that equal models have equal shapes.
  if sizes.get("num_kv_heads") == sizes["num_heads"]:
    sizes["num_kv_heads"] = 0
  if sizes.get("head_dim", 0) * sizes["num_heads"] == sizes["model_dim"]:
    sizes["head_dim"] = 0
  return sizes


def config_of(shape: ModelShape, family_name: str) -> dict[str, Any]:
  """Returns the values of config.json for a model; reverses `shape_of`.

  Args:
    shape: Sizes of the model.
    family_name: Name of its family, one of `FAMILIES`.
  """
  family = FAMILIES[family_name]
  config = {
    key: getattr(shape, field) for field, key in family.size_keys.items()
  }
  config.update(family.expected)
  config["model_type"] = family_name
  config["architectures"] = [family.architecture]
  config["torch_dtype"] = "float32"
  if family_name == "opt":
    config["word_embed_proj_dim"] = shape.model_dim
    return config
  # In `ModelShape` 0 means the usual size. Other libraries read the number.
  config["head_dim"] = shape.head_width
  config["num_key_value_heads"] = shape.kv_heads
  # The base also stays in `rope_theta`, where older versions look for it.
  config["rope_parameters"] = {
    "rope_theta": shape.rope_base,
    "rope_type": config.pop("rope_type"),
  }
  return config


def family_of(shape: ModelShape) -> str:
  """Returns the name of the family that has models of a shape.

  Args:
    shape: Sizes and options of the model.

  Raises:
    ValueError: One line, if no family has such a model.
  """
  for name, family in FAMILIES.items():
    if _has_options_of(family, shape):
      return name
  raise ValueError(
    f"no family of {', '.join(FAMILIES)} has a model like {shape}: it cannot "
    "be exported"
  )


def _has_options_of(family: Family, shape: ModelShape) -> bool:
  """Whether a model differs from a family's models only in its sizes."""
  # A subclass may belong to a model that computes something else.
  if type(shape) is not ModelShape:
    return False
  for field in dataclasses.fields(ModelShape):
    if field.name in family.size_keys:
      continue
    option = family.shape_options.get(field.name, field.default)
    if getattr(shape, field.name) != option:
      return False
  return True


def params_of(
  tensors: Mapping[str, np.ndarray], shape: ModelShape, family_name: str
) -> dict[str, Any]:
  """Returns the parameters of a model from the tensors of its checkpoint.

  Args:
    tensors: Tensors of the checkpoint, by their names in the family.
    shape: Sizes of the model.
    family_name: Name of the family, one of `FAMILIES`.

  Returns:
    The parameters as a nested dict of fp32 arrays.

  Raises:
    ValueError: One line, if a tensor is missing, has another shape, has no
      floats or a value that is not finite, or belongs to no parameter, or if a
      tied head differs from the embedding.
  """
  family = FAMILIES[family_name]
  params: dict[str, np.ndarray] = {}
  unread = {key for key in tensors if not key.endswith(_FREQUENCIES_SUFFIX)}
  for path, leaf_shape in shape.parameter_shapes.items():
    tensor_shape = _tensor_shape(path, leaf_shape, family)
    leaves = []
    for key in _tensor_names(path, shape, family):
      require(
        key in tensors, f"the checkpoint is no {family_name}: it lacks {key}"
      )
      unread.discard(key)
      values = _checked_values(key, tensors[key], tensor_shape)
      leaves.append(_swap_kernel_axes(path, values))
    if _is_stacked(path):
      params[path] = np.stack(leaves)
    elif path == _POSITIONS:
      params[path] = leaves[0][family.first_position :]
    else:
      params[path] = leaves[0]
  if shape.tied_head and _HEAD_TENSOR in unread:
    _check_head_is_embedding(tensors[_HEAD_TENSOR], params["embed/embedding"])
    unread.discard(_HEAD_TENSOR)
  unknown = min(unread, default="")
  require(
    not unread,
    f"the checkpoint is no {family_name}: what is {shown(unknown)}?",
  )
  return nested(params)


def _check_head_is_embedding(head: np.ndarray, embedding: np.ndarray) -> None:
  """Checks that the head of a checkpoint with a tied head is the embedding.

  Args:
    head: Tensor of the head.
    embedding: The embedding in fp32, [V, D].

  Raises:
    ValueError: One line, if they differ.
  """
  head_values = _checked_values(_HEAD_TENSOR, head, embedding.shape)
  require(
    np.array_equal(head_values, embedding),
    f"config.json says that head and embedding are one, but {_HEAD_TENSOR} is "
    "not the embedding: copy both again",
  )


def _tensor_shape(
  path: str, leaf_shape: tuple[int, ...], family: Family
) -> tuple[int, ...]:
  """Returns the shape that each tensor of a leaf has in a checkpoint.

  Args:
    path: Path of the leaf.
    leaf_shape: Shape of the leaf here; for a leaf of the blocks with the layer
      axis.
    family: The family of the checkpoint.
  """
  if path == _POSITIONS:
    num_rows, width = leaf_shape
    return (family.first_position + num_rows, width)
  if _is_stacked(path):
    leaf_shape = leaf_shape[1:]
  if _is_kernel(path):
    return leaf_shape[::-1]
  return leaf_shape


def _checked_values(
  key: str, tensor: np.ndarray, expected_shape: tuple[int, ...]
) -> np.ndarray:
  """Returns the values of a tensor in fp32.

  Args:
    key: Name of the tensor, for messages.
    tensor: The tensor.
    expected_shape: Shape that the tensor should have.

  Raises:
    ValueError: One line, if the tensor has another shape, is of a type that has
      no floats, or has a value that is not finite in fp32.
  """
  require(
    tensor.shape == expected_shape,
    f"the tensor {key} has the shape {tensor.shape}, but by its config.json "
    f"{expected_shape}",
  )
  require(
    jnp.issubdtype(tensor.dtype, jnp.floating),
    f"the tensor {key} has the type {tensor.dtype}, and not that of a weight: "
    "convert the checkpoint to floats",
  )
  # A value of fp64 may be too large for fp32. numpy would warn about it and
  # make it infinite. The check below refuses it anyway.
  with np.errstate(over="ignore"):
    values = np.asarray(tensor, np.float32)
  require(
    bool(np.isfinite(values).all()),
    f"the tensor {key} has values that are not finite: the checkpoint is "
    "damaged; copy it again",
  )
  return values


def tensors_of(
  params: Any, shape: ModelShape, family_name: str
) -> dict[str, np.ndarray]:
  """Returns the tensors of a checkpoint, by name; reverses `params_of`.

  Args:
    params: Parameters of the model, a nested dict of arrays.
    shape: Sizes of the model.
    family_name: Name of the family, one of `FAMILIES`.
  """
  family = FAMILIES[family_name]
  leaves = leaves_by_path(params)
  tensors = {}
  for path in shape.parameter_shapes:
    leaf = np.asarray(leaves[path])
    if path == _POSITIONS:
      # The rows in front of the first position are zeros. Nothing reads them.
      leaf = np.pad(leaf, ((family.first_position, 0), (0, 0)))
    layers = leaf if _is_stacked(path) else [leaf]
    keys = _tensor_names(path, shape, family)
    for key, values in zip(keys, layers, strict=True):
      tensor = _swap_kernel_axes(path, values)
      tensors[key] = np.ascontiguousarray(tensor)
  return tensors


def _tensor_names(
  path: str, shape: ModelShape, family: Family
) -> Iterator[str]:
  """Yields the names of a leaf's tensors in a checkpoint.

  A leaf of the blocks has a tensor for each layer, and any other leaf has one
  tensor. The names are not put into a list, because a damaged config may say
  that there are a billion layers: the reader stops at the first name that the
  checkpoint lacks.

  Args:
    path: Path of the leaf, e.g. "blocks/mlp/up/kernel".
    shape: Sizes of the model.
    family: The family of the checkpoint.
  """
  module_path, _, last_key = path.rpartition("/")
  # The two tables of "embed" are different modules in a checkpoint, so they
  # have their whole paths in `module_names`.
  if path in family.module_names:
    module = family.module_names[path]
  else:
    module = family.module_names[module_path]
  name = f"{module}.{_TENSOR_ENDS[last_key]}"
  num_tensors = shape.num_layers if _is_stacked(path) else 1
  for layer in range(num_tensors):
    yield name.format(layer)


def _is_stacked(path: str) -> bool:
  """Whether a leaf has an axis of layers in front."""
  return path.startswith("blocks/")


def _is_kernel(path: str) -> bool:
  """Whether a leaf is the matrix of a linear layer."""
  return path.endswith("/kernel")


def _swap_kernel_axes(path: str, values: np.ndarray) -> np.ndarray:
  """Transposes a kernel, and returns the values of any other leaf unchanged.

  Checkpoints have kernels [outputs, inputs], and the built-in decoder has
  kernels [inputs, outputs].

  Args:
    path: Path of the leaf.
    values: Values of the leaf, for one layer.
  """
  if _is_kernel(path):
    return values.T
  return values
