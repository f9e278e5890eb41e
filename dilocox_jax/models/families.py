"""How checkpoints of OPT, Llama and Qwen differ from the built-in decoder.

`FAMILIES` has a row for each family of models: the names of its tensors, the
names of its sizes in `config.json`, and the options that all of its models
share. The functions convert a config to a `ModelShape` and back, and the leaves
of a model to the tensors of a checkpoint and back. They read no files.
"""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.checks import of_type, require, shown
from dilocox_jax.plan.model.shapes import (
  KEPT_TURNS,
  STRETCHED_LENGTH,
  STRETCHED_TURNS,
  ModelShape,
)

# Leaf of the built-in decoder that holds the table of learned positions.
POSITIONS = "embed/positions"
# Tensor of the head. A checkpoint with a tied head may have it too.
HEAD_TENSOR = "lm_head.weight"
# Older checkpoints hold the frequencies of rotary positions. They are not read,
# because the decoder computes them from the base.
FREQUENCIES_SUFFIX = "rotary_emb.inv_freq"
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
    shape_options: Fields of `ModelShape` with the same value in all models of
      the family.
    size_keys: Key of config.json by field of `ModelShape`, for the fields that
      differ between models. `shape_of` also reads `rope_factor`, from several
      keys. The other fields have their defaults, unless `shape_options` names
      them.
    module_names: Names of the modules in a checkpoint, by path of the module in
      the built-in decoder. The two tables of "embed" have their whole paths,
      e.g. "embed/positions". "{}" stands for the number of the layer.
    expected: Values that config.json must have, by key, because the built-in
      decoder supports no others. A missing key counts as its expected value.
    ties_head: Value of `tie_word_embeddings` (whether the head is the
      embedding) if config.json lacks the key.
    first_position: Row of the table of learned positions that belongs to the
      first token. The rows before it are not read.
  """

  architecture: str
  shape_options: Mapping[str, Any]
  size_keys: Mapping[str, str]
  module_names: Mapping[str, str]
  expected: Mapping[str, Any]
  ties_head: bool = False
  first_position: int = 0

  @property
  def is_rotary(self) -> bool:
    """Whether the models have rotary positions."""
    return "rope_base" in self.size_keys


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
# Names of modules in a checkpoint, by path of the module in the decoder.
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
# Qwen3 also has norms of the queries and of the keys.
_QWEN3_MODULE_NAMES = _LLAMA_MODULE_NAMES | {
  "blocks/attention/query_norm": "model.layers.{}.self_attn.q_norm",
  "blocks/attention/key_norm": "model.layers.{}.self_attn.k_norm",
}
# A quantized checkpoint has more tensors, such as scales, which are not read.
_NOT_QUANTIZED = {"quantization_config": None}
_LLAMA_EXPECTED = _NOT_QUANTIZED | {"hidden_act": "silu"}
_QWEN_EXPECTED = _LLAMA_EXPECTED | {"use_sliding_window": False}
# Keys of rotary positions that config.json may have. Other keys rotate only a
# part of each head, or differ between layers. The decoder has neither.
_ROPE_KEYS = ("rope_theta", "rope_type")
# The rope type of Llama 3.1 has these keys, too. The decoder reads only the
# factor, because all published models have these values of the others.
_STRETCHED_ROPE = "llama3"
_STRETCHED_ROPE_VALUES = {
  "low_freq_factor": STRETCHED_TURNS,
  "high_freq_factor": KEPT_TURNS,
  "original_max_position_embeddings": STRETCHED_LENGTH,
}
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
    expected=_QWEN_EXPECTED,
  ),
  "qwen3": Family(
    architecture="Qwen3ForCausalLM",
    shape_options={"biases": "none", "qk_norm": True},
    size_keys=_LLAMA_SIZE_KEYS,
    module_names=_QWEN3_MODULE_NAMES,
    expected=_QWEN_EXPECTED,
  ),
}
# Values of the fields whose key config.json may lack. `Family.ties_head` is the
# value of "tied_head".
_DEFAULT_SIZES = {"head_dim": 0, "rope_base": 10_000.0, "num_kv_heads": 0}


def shape_of(config: Mapping[str, Any]) -> ModelShape:
  """Returns the `ModelShape` that a config.json describes.

  Args:
    config: Values of config.json, by key.

  Raises:
    ValueError: One line, if the family is unknown, if a size is missing or
      impossible, or if the built-in decoder does not support the model.
  """
  family_name = str(config.get("model_type"))
  require(
    family_name in FAMILIES,
    f"a checkpoint of the family {shown(family_name)} cannot be read: have "
    f"{', '.join(FAMILIES)}",
  )
  family = FAMILIES[family_name]
  rope = _rope_values(config)
  # Newer versions of `transformers` write `rope_theta` into `rope_parameters`.
  values = {**config, **rope}
  for key, expected_value in family.expected.items():
    value = values.get(key, expected_value)
    require(
      value == expected_value,
      f"config.json: {key}={shown(value)} is not computed here, only "
      f"{expected_value!r}",
    )
  sizes = _sizes(values, family)
  if family.is_rotary:
    sizes["rope_factor"] = _rope_factor(rope)
  return ModelShape(**sizes, **family.shape_options)


def _rope_values(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `rope_scaling` and `rope_parameters` of config.json as one dict.

  If both have a key, the value of `rope_parameters` is taken.
  """
  # Newer versions of `transformers` write `rope_parameters`.
  rope: dict[str, Any] = {}
  for section in ("rope_scaling", "rope_parameters"):
    values = config.get(section) or {}
    rope |= of_type(f"config.json: {section}", values, dict)
  return rope


def _rope_factor(rope: Mapping[str, Any]) -> float:
  """Returns the divisor of the speed of slow rotations, 1 if none is slowed.

  Raises ValueError for rotary positions that the decoder does not support.
  """
  # Older checkpoints have the key "type".
  rope_type = rope.get("rope_type", rope.get("type", "default"))
  require(
    rope_type in ("default", _STRETCHED_ROPE),
    f"config.json: rope_type={shown(rope_type)} is not computed here, only "
    f"'default' and {_STRETCHED_ROPE!r}",
  )
  known_keys = {*_ROPE_KEYS, "type"}
  if rope_type == _STRETCHED_ROPE:
    known_keys |= {"factor", *_STRETCHED_ROPE_VALUES}
    for key, expected_value in _STRETCHED_ROPE_VALUES.items():
      value = rope.get(key)
      require(
        value == expected_value,
        f"config.json: {key}={shown(value)} is not computed here, only "
        f"{expected_value!r}",
      )
  unknown_keys = sorted(rope.keys() - known_keys)
  if unknown_keys:
    raise ValueError(
      f"config.json: rope_parameters has {shown(unknown_keys[0])}, which is "
      f"not computed here, only {' and '.join(_ROPE_KEYS)}"
    )
  if rope_type == "default":
    return 1.0
  return of_type("config.json: factor", rope.get("factor"), float)


def _sizes(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
  """Reads the fields of `ModelShape` that `family.size_keys` names.

  `values` are those of config.json. Raises ValueError if a size is missing or
  of a wrong type.
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
  """Returns the values of config.json for a model; reverses `shape_of`."""
  family = FAMILIES[family_name]
  config = {
    key: getattr(shape, field) for field, key in family.size_keys.items()
  }
  config.update(family.expected)
  config["model_type"] = family_name
  config["architectures"] = [family.architecture]
  config["torch_dtype"] = "float32"
  if family_name == "opt":
    # OPT models may have an embedding of another width than their layers.
    config["word_embed_proj_dim"] = shape.model_dim
    return config
  # In `ModelShape` 0 means the usual size. Other libraries read the number.
  config["head_dim"] = shape.head_width
  config["num_key_value_heads"] = shape.kv_heads
  # The base also stays in `rope_theta`, where older versions look for it.
  rope = {"rope_theta": shape.rope_base, "rope_type": "default"}
  if shape.rope_factor != 1:
    rope["rope_type"] = _STRETCHED_ROPE
    rope["factor"] = shape.rope_factor
    rope |= _STRETCHED_ROPE_VALUES
    # Older versions of `transformers` look here.
    config["rope_scaling"] = {
      key: value for key, value in rope.items() if key != "rope_theta"
    }
  config["rope_parameters"] = rope
  return config


def family_of(shape: ModelShape) -> str:
  """Returns the name of the family to which a model of this shape belongs.

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
  """Returns whether a model differs from a family's models only in its sizes.

  The sizes are the fields in `size_keys`, and for rotary positions also
  `rope_factor`.
  """
  # A subclass may belong to a model that computes something else.
  if type(shape) is not ModelShape:
    return False
  for field in dataclasses.fields(ModelShape):
    if field.name in family.size_keys:
      continue
    if field.name == "rope_factor" and family.is_rotary:
      continue
    option = family.shape_options.get(field.name, field.default)
    if getattr(shape, field.name) != option:
      return False
  return True


def tensor_shape(
  path: str, leaf_shape: tuple[int, ...], family: Family
) -> tuple[int, ...]:
  """Returns the shape of each tensor that holds a leaf in a checkpoint.

  A leaf of the blocks is one tensor per layer in a checkpoint, without the
  layer axis. Kernels are transposed. The table of learned positions has
  `Family.first_position` more rows in a checkpoint.

  Args:
    path: Path of the leaf in the built-in decoder.
    leaf_shape: Shape of the leaf in the built-in decoder.
    family: The family of the checkpoint.
  """
  if path == POSITIONS:
    num_rows, width = leaf_shape
    return (family.first_position + num_rows, width)
  if is_stacked(path):
    leaf_shape = leaf_shape[1:]
  if is_kernel(path):
    return leaf_shape[::-1]
  return leaf_shape


def tensor_names(path: str, shape: ModelShape, family: Family) -> Iterator[str]:
  """Yields the names of a leaf's tensors in a checkpoint.

  A leaf of the blocks, e.g. "blocks/mlp/up/kernel", has one tensor per layer;
  other leaves have one tensor.
  """
  # Names come one by one, because a damaged config may claim a billion layers.
  num_tensors = shape.num_layers if is_stacked(path) else 1
  for layer in range(num_tensors):
    yield tensor_name(path, layer, family)


def tensor_name(path: str, layer: int, family: Family) -> str:
  """Returns the name of a leaf's tensor in a checkpoint.

  A leaf of the blocks has one tensor for each layer, and `layer` is the number
  of the layer. For other leaves `layer` is ignored.
  """
  module_path, _, last_key = path.rpartition("/")
  # The two tables of "embed" are different modules in a checkpoint, so they
  # have their whole paths in `module_names`.
  if path in family.module_names:
    module = family.module_names[path]
  else:
    module = family.module_names[module_path]
  return f"{module}.{_TENSOR_ENDS[last_key]}".format(layer)


def leaves_of(
  tensors: Mapping[str, np.ndarray], shape: ModelShape, family_name: str
) -> dict[str, np.ndarray]:
  """Converts tensors of a checkpoint to leaves of the built-in decoder.

  Layers are stacked, kernels are transposed, and unused rows of learned
  positions are dropped (`Family.first_position`).

  Args:
    tensors: Values of the tensors by their names in the family.
    shape: Sizes of the model.
    family_name: Name of the family, one of `FAMILIES`.

  Returns:
    Copies of the values by path of the leaf. The paths are in the order in
    which JAX flattens a nested dict.

  Raises:
    KeyError: If a tensor is missing.
  """
  family = FAMILIES[family_name]
  leaves = {}
  for path in sorted(shape.parameter_shapes, key=lambda path: path.split("/")):
    layers = [tensors[name] for name in tensor_names(path, shape, family)]
    if is_kernel(path):
      layers = [layer.T for layer in layers]
    leaf = np.stack(layers) if is_stacked(path) else np.array(layers[0])
    if path == POSITIONS:
      leaf = leaf[family.first_position :]
    leaves[path] = leaf
  return leaves


def tensors_of(
  leaves: Mapping[str, Any], shape: ModelShape, family_name: str
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields name and fp32 values of each tensor of a checkpoint.

  Reverses `leaves_of`.

  Args:
    leaves: Leaves of the model by path. `np.asarray` is called on each only
      when its tensors are yielded.
    shape: Sizes of the model.
    family_name: Name of the family, one of `FAMILIES`.
  """
  family = FAMILIES[family_name]
  for path in shape.parameter_shapes:
    leaf = np.asarray(leaves[path], np.float32)
    if path == POSITIONS:
      # The rows in front of the first position are zeros. Nothing reads them.
      leaf = np.pad(leaf, ((family.first_position, 0), (0, 0)))
    layers = leaf if is_stacked(path) else [leaf]
    names = tensor_names(path, shape, family)
    for name, values in zip(names, layers, strict=True):
      # Checkpoints have kernels [outputs, inputs].
      tensor = values.T if is_kernel(path) else values
      yield name, np.ascontiguousarray(tensor)


def is_stacked(path: str) -> bool:
  """Whether a leaf has a leading layer axis, as all leaves of blocks do."""
  return path.startswith("blocks/")


def is_kernel(path: str) -> bool:
  """Whether the leaf at `path` is the matrix of a linear layer."""
  return path.endswith("/kernel")
