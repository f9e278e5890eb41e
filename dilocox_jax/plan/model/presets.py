"""Named model sizes, shared by configs, tests and tables.

A preset is only a `ModelShape`: it can be counted, planned and simulated
without building anything.
"""

import inspect

from dilocox_jax.checks import require, shown
from dilocox_jax.plan.choices import Registry, check_lazy
from dilocox_jax.plan.model.shapes import ModelShape

BYTE_VOCABULARY = 256

MODEL_PRESETS: Registry[ModelShape] = Registry("model")


def register_model(name: str, shape: ModelShape) -> None:
  """Makes a model known under a name, for `model.preset`.

  Args:
    name: The name, e.g. "tiny".
    shape: Sizes of the model. A class of its own says with `builder` what
      builds the model, and with `block_shapes` which parameters a layer has.

  Raises:
    ValueError: If the name is taken, it is no shape, a class of its own says
      only one of the two, or its builder cannot be called as
      `models.transformer.build_model`.
  """
  kind, roles = type(shape), ("builder", "block_shapes")
  is_shape = hasattr(kind, "builder")
  require(is_shape, f"model {name!r}: {shown(shape)} must be a ModelShape")
  check_lazy(f"model {name!r}: builder", kind.builder)
  if callable(kind.builder):
    options = dict.fromkeys(("dtype", "unroll", "attention", "remat"))
    try:
      inspect.signature(kind.builder).bind(shape, **options)
    except TypeError as error:
      said = f"builder must take (shape, *, {', '.join(options)})"
      raise ValueError(f"model {name!r}: {said}: {error}") from error
  own = [r for r in roles if getattr(kind, r) != getattr(ModelShape, r)]
  require(
    len(own) != 1,
    f"model {name!r}: {kind.__name__} has a {own} of its own, but the "
    f"transformer's otherwise: give it both of {roles}",
  )
  MODEL_PRESETS.add(name, shape)


def _chinchilla(num_layers: int, ff_dim: int, num_heads: int) -> ModelShape:
  """Returns a model of Streaming DiLoCo, arXiv 2501.18512, table 2.

  The hidden dim of the table is that of the MLP. The paper does not say whether
  the MLP has two matrices (the width of 4 D suggests it) or whether the head is
  tied (it is here, as 35M is then 35.3 million parameters).
  """
  return ModelShape(
    num_layers,
    ff_dim // 4,
    num_heads,
    ff_dim,
    vocab_size=32000,
    activation="gelu",
    qk_norm=True,
    tied_head=True,
  )


# The numbers of a shape are its layers, width D, heads N, width F of the MLP
# and vocabulary V, in this order.
for _name, _shape in {
  # The project's default: it trains to something readable in minutes on two CPU
  # cores. With F = 344, SwiGLU's three matrices have about as many parameters
  # as GELU's two with F = 4 D = 512: 3 x 344 = 1032 and 2 x 512 = 1024 columns.
  "tiny": ModelShape(4, 128, 4, 344, BYTE_VOCABULARY),
  # A model for tests. It is small enough for loops in numpy, and has two of
  # everything that is stacked.
  "nano": ModelShape(2, 16, 2, 24, BYTE_VOCABULARY),
  # Two sizes between tiny and the papers': hours on one accelerator. They read
  # bytes too; model.vocab_size sets another vocabulary.
  "small": ModelShape(8, 512, 8, 1376, BYTE_VOCABULARY),
  "medium": ModelShape(12, 768, 12, 2048, BYTE_VOCABULARY),
  # OpenDiLoCo's two models (arXiv 2407.07852): the larger has the sizes of
  # TinyLlama (Zhang et al. 2024, arXiv 2401.02385); those of the smaller are
  # recalled, and its name leaves out both tables.
  "llama_150m": ModelShape(12, 1024, 16, 2688, 32000, norm_epsilon=1e-5),
  "llama_1_1b": ModelShape(
    22, 2048, 32, 5632, 32000, num_kv_heads=4, norm_epsilon=1e-5
  ),
  # DiLoCoX's two models (arXiv 2506.21263, by their names; OPT is of Zhang et
  # al. 2022, arXiv 2205.01068, table 1; sizes of the large one recalled,
  # unverified, and without the biases of Qwen: model.biases=qkv adds them).
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
