"""Named model sizes, which a config chooses by `model.preset`.

A preset is a `ModelShape`: its parameters can be counted, and its runs planned
and simulated, without building the model.
"""

import functools
import inspect

from dilocox_jax.checks import require, shown
from dilocox_jax.plan.choices import Registry, check_lazy
from dilocox_jax.plan.model.shapes import ModelShape

BYTE_VOCABULARY = 256

MODEL_PRESETS: Registry[ModelShape] = Registry("model")


def register_model(name: str, shape: ModelShape) -> None:
  """Registers a model under a name, for `model.preset`.

  Args:
    name: The name, e.g. "tiny".
    shape: Sizes of the model. A `ModelShape` stands for the built-in decoder of
      these sizes. For another model, pass an instance of a subclass: its
      `builder` builds the model, and its `block_shapes` returns the shapes of a
      layer's parameters.

  Raises:
    ValueError: If the name is taken or is no identifier, if `shape` is no
      `ModelShape`, if a subclass overrides only one of `builder` and
      `block_shapes`, or if its builder is neither a "module:name" nor a
      function that can be called like `models.transformer.build_model`.
  """
  kind = type(shape)
  is_shape = hasattr(kind, "builder")
  require(is_shape, f"model {name!r}: {shown(shape)} must be a ModelShape")
  check_lazy(f"model {name!r}: builder", kind.builder)
  if callable(kind.builder):
    options = dict.fromkeys(("dtype", "unroll", "attention", "remat"))
    try:
      # This checks the arguments, and does not call the builder.
      inspect.signature(kind.builder).bind(shape, **options)
    except TypeError as error:
      raise ValueError(
        f"model {name!r}: builder must take (shape, *, {', '.join(options)}): "
        f"{error}"
      ) from error
  # Runs are planned with the shapes that `block_shapes` returns. These must be
  # the shapes of the model that `builder` builds.
  attributes = ("builder", "block_shapes")
  overridden = [
    attribute
    for attribute in attributes
    if getattr(kind, attribute) != getattr(ModelShape, attribute)
  ]
  require(
    len(overridden) != 1,
    f"model {name!r}: {kind.__name__} has a {overridden} of its own, but the "
    f"transformer's otherwise: give it both of {attributes}",
  )
  MODEL_PRESETS.add(name, shape)


def _chinchilla(num_layers: int, ff_dim: int, num_heads: int) -> ModelShape:
  """Returns the sizes of a model of Streaming DiLoCo.

  We assume that the "hidden dim" of the paper's table is `ff_dim`, that
  `ff_dim` is 4 times the model dimension, and that the head is tied. Then the
  model 35M has 35.3 million parameters.

  Source: Douillard et al., 2025, arXiv 2501.18512, table 2.
  """
  return ModelShape(
    num_layers=num_layers,
    model_dim=ff_dim // 4,
    num_heads=num_heads,
    ff_dim=ff_dim,
    vocab_size=32000,
    activation="gelu",
    qk_norm=True,
    tied_head=True,
  )


# Models of Meta's Llama.
# Status: published. The sizes are those of the config.json of the checkpoints
# Llama-2-7b-hf, Llama-2-13b-hf, Meta-Llama-3-8B and Llama-3.1-8B.
# Source: Touvron et al. 2023, arXiv 2307.09288; Grattafiori et al. 2024, arXiv
# 2407.21783, table 3.
_llama = functools.partial(ModelShape, norm_epsilon=1e-5)

# Base models of Qwen2.5.
# Status: published. The sizes are those of the config.json of the checkpoints
# Qwen2.5-0.5B, Qwen2.5-1.5B, Qwen2.5-3B, Qwen2.5-7B and Qwen2.5-14B. The 14B
# model that follows instructions has the epsilon 1e-6.
# Source: Qwen Team 2024, arXiv 2412.15115, table 1.
_qwen2_5 = functools.partial(ModelShape, rope_base=1_000_000.0, biases="qkv")

# Dense models of Qwen3. A head is always 128 wide. In two of the models all
# heads together are wider than D, so `head_dim` has to be given.
# Status: published. The sizes are those of the config.json of the checkpoints
# Qwen3-0.6B, Qwen3-1.7B, Qwen3-4B, Qwen3-8B and Qwen3-14B.
# Source: Yang et al. 2025, arXiv 2505.09388, table 1.
_qwen3 = functools.partial(
  ModelShape,
  vocab_size=151936,
  num_kv_heads=8,
  qk_norm=True,
  rope_base=1_000_000.0,
)

# The five numbers of each shape are the number of layers, the width D, the
# number of heads N, the width F of the MLP and the vocabulary V, in this order.
for _name, _shape in {
  # The project's default. It writes something readable after minutes of
  # training on two CPU cores. With F = 344, SwiGLU's three matrices have about
  # as many parameters as GELU's two with F = 4 D = 512: 3 x 344 = 1032 and
  # 2 x 512 = 1024 columns.
  "tiny": ModelShape(4, 128, 4, 344, BYTE_VOCABULARY),
  # A model for tests. It is small enough for loops in numpy, and has two layers
  # and two heads.
  "nano": ModelShape(2, 16, 2, 24, BYTE_VOCABULARY),
  # Two sizes between "tiny" and the models of the papers. They train in hours
  # on one accelerator. They read bytes; model.vocab_size sets another
  # vocabulary.
  "small": ModelShape(8, 512, 8, 1376, BYTE_VOCABULARY),
  "medium": ModelShape(12, 768, 12, 2048, BYTE_VOCABULARY),
  # OpenDiLoCo's two models (arXiv 2407.07852). The larger one has the sizes of
  # TinyLlama (Zhang et al. 2024, arXiv 2401.02385). The sizes of the smaller
  # one are recalled, and the number in its name does not count its two tables.
  "llama_150m": ModelShape(12, 1024, 16, 2688, 32000, norm_epsilon=1e-5),
  "llama_1_1b": ModelShape(
    22, 2048, 32, 5632, 32000, num_kv_heads=4, norm_epsilon=1e-5
  ),
  # DiLoCoX's two models (arXiv 2506.21263), which the paper only names. The
  # sizes of OPT are from Zhang et al. 2022, arXiv 2205.01068, table 1. The
  # sizes of the large model are recalled and unverified. The biases of Qwen are
  # left out; model.biases=qkv adds them.
  "opt_1_3b": ModelShape(
    24,
    2048,
    32,
    8192,
    50272,
    activation="relu",
    tied_head=True,
    positions="learned",
    num_positions=2048,
    norm="layer",
    norm_epsilon=1e-5,
    biases="all",
  ),
  "qwen_107b": ModelShape(78, 8192, 64, 49152, 152064, num_kv_heads=8),
  # Models that many people train or fine-tune. "llama_7b" and "llama_13b" are
  # Llama 2.
  "llama_7b": _llama(32, 4096, 32, 11008, 32000),
  "llama_13b": _llama(40, 5120, 40, 13824, 32000),
  "llama3_8b": _llama(
    32, 4096, 32, 14336, 128256, num_kv_heads=8, rope_base=500_000.0
  ),
  "llama3_1_8b": _llama(
    32,
    4096,
    32,
    14336,
    128256,
    num_kv_heads=8,
    rope_base=500_000.0,
    rope_factor=8.0,
  ),
  "qwen2_5_0_5b": _qwen2_5(
    24, 896, 14, 4864, 151936, num_kv_heads=2, tied_head=True
  ),
  "qwen2_5_1_5b": _qwen2_5(
    28, 1536, 12, 8960, 151936, num_kv_heads=2, tied_head=True
  ),
  "qwen2_5_3b": _qwen2_5(
    36, 2048, 16, 11008, 151936, num_kv_heads=2, tied_head=True
  ),
  "qwen2_5_7b": _qwen2_5(28, 3584, 28, 18944, 152064, num_kv_heads=4),
  "qwen2_5_14b": _qwen2_5(
    48, 5120, 40, 13824, 152064, num_kv_heads=8, norm_epsilon=1e-5
  ),
  "qwen3_0_6b": _qwen3(28, 1024, 16, 3072, head_dim=128, tied_head=True),
  "qwen3_1_7b": _qwen3(28, 2048, 16, 6144, tied_head=True),
  "qwen3_4b": _qwen3(36, 2560, 32, 9728, head_dim=128, tied_head=True),
  "qwen3_8b": _qwen3(36, 4096, 32, 12288),
  "qwen3_14b": _qwen3(40, 5120, 40, 17408),
  "chinchilla_35m": _chinchilla(6, 2048, 8),
  "chinchilla_100m": _chinchilla(9, 3072, 12),
  "chinchilla_200m": _chinchilla(12, 4096, 16),
  "chinchilla_300m": _chinchilla(15, 5120, 20),
  "chinchilla_500m": _chinchilla(18, 6144, 24),
  "chinchilla_1b": _chinchilla(24, 8192, 32),
  "chinchilla_4b": _chinchilla(36, 12288, 48),
}.items():
  register_model(_name, _shape)

nano = MODEL_PRESETS["nano"]
