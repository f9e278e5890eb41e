"""Computes the shapes of a model's parameters without making any array.

So planning a model of 107 billion parameters takes hardly any memory. This
module needs no JAX.
"""

import dataclasses
import math
from typing import ClassVar

from dilocox_jax.checks import (
  check_limits,
  limited,
  of_type,
  require,
  within_limits,
)
from dilocox_jax.plan.choices import Lazy

ACTIVATIONS = ("swiglu", "gelu", "relu")
POSITIONS = ("rope", "learned")
NORMS = ("rms", "layer")
BIASES = ("none", "qkv", "all")
# Llama 3.1, 3.2 and 3.3 stretch the rotations that turn less than once in the
# sequences of their first training, 8192 tokens. Rotations that turn at least 4
# times keep their speed (`models.attention.rotation_speeds`).
STRETCHED_LENGTH = 8192
STRETCHED_TURNS = 1.0
KEPT_TURNS = 4.0
_LARGEST = 2**31  # No array of JAX has a longer axis.


@dataclasses.dataclass(frozen=True)
class ModelShape:
  """Sizes and options of a decoder-only transformer.

  Attributes:
    num_layers: Number of transformer blocks.
    model_dim: Width of the residual stream, D.
    num_heads: Number of attention heads, N.
    ff_dim: Hidden width of the MLP, F. With SwiGLU each of the two branches has
      this width.
    vocab_size: Number of tokens in the vocabulary, V.
    head_dim: Width of one attention head. 0 means model_dim / num_heads. With
      "rope" the width must be even.
    activation: "swiglu" (Shazeer 2020, arXiv 2002.05202), "gelu" or "relu".
    qk_norm: Whether queries and keys of each head are normalized before their
      product (Dehghani et al. 2023, arXiv 2302.05442, section 2.1).
    num_kv_heads: Number of heads of keys and values (Ainslie et al. 2023, arXiv
      2305.13245). It must divide num_heads, because equally many query heads
      share each of these heads. 0 means num_heads.
    tied_head: Whether the output head is the embedding table. Otherwise the
      head has a matrix of its own.
    positions: "rope" rotates queries and keys (Su et al. 2021, arXiv
      2104.09864), "learned" adds a table to the embedding.
    num_positions: Number of rows of the table of learned positions, and so the
      longest sequence. 0 with "rope".
    rope_base: Base of the angles of "rope".
    rope_factor: Divisor of the speed of the slow rotations of "rope", as in
      Llama 3.1. 1 means that no rotation is slowed.
    norm: "rms" (Zhang and Sennrich 2019, arXiv 1910.07467), or "layer", which
      also subtracts the mean and adds a bias (Ba et al. 2016, arXiv
      1607.06450).
    norm_epsilon: Number that a norm adds to the mean square ("rms") or the
      variance ("layer") before the square root.
    biases: Which projections add a bias: "none", "qkv" (queries, keys and
      values, as in Qwen2), or "all" (all but the head, as in OPT).
  """

  # Builds the model's functions from the shape (`models.transformer`).
  builder: ClassVar[Lazy] = "dilocox_jax.models.transformer:build_model"

  num_layers: int
  model_dim: int
  num_heads: int
  ff_dim: int
  vocab_size: int
  head_dim: int = limited(0, at_least=0, at_most=_LARGEST)
  activation: str = limited("swiglu", choices=ACTIVATIONS)
  qk_norm: bool = False
  num_kv_heads: int = limited(0, at_least=0, at_most=_LARGEST)
  tied_head: bool = False
  positions: str = limited("rope", choices=POSITIONS)
  num_positions: int = limited(0, at_least=0, at_most=_LARGEST)
  rope_base: float = limited(10_000.0, above=0, below=math.inf)
  rope_factor: float = limited(1.0, at_least=1, below=math.inf)
  norm: str = limited("rms", choices=NORMS)
  norm_epsilon: float = limited(1e-6, above=0, below=math.inf)
  biases: str = limited("none", choices=BIASES)

  def __post_init__(self):
    """Raises ValueError if no model can have these sizes."""
    # `limited` declares the limits of fields with a default. These have none.
    for name in "num_layers model_dim num_heads ff_dim vocab_size".split():
      size = of_type(name, getattr(self, name), int)
      within_limits(name, size, at_least=1, at_most=_LARGEST)
    check_limits(self)
    if not self.head_dim and self.model_dim % self.num_heads:
      raise ValueError(
        f"model_dim={self.model_dim} must be divisible by "
        f"num_heads={self.num_heads}: change one of them, or set head_dim"
      )
    if self.num_heads % self.kv_heads:
      raise ValueError(
        f"num_kv_heads={self.num_kv_heads} must divide "
        f"num_heads={self.num_heads}: equally many query heads share each head "
        "of keys and values"
      )
    require(
      (self.positions == "learned") == (self.num_positions > 0),
      f"positions={self.positions!r} does not go with num_positions="
      f"{self.num_positions}: learned positions need their number, others "
      "have none",
    )
    if self.positions == "rope" and self.head_width % 2:
      raise ValueError(
        f"head width {self.head_width} (head_dim={self.head_dim}, "
        f"model_dim={self.model_dim} / num_heads={self.num_heads}) must be "
        "even, because rotary position embeddings rotate pairs of values"
      )

  @property
  def head_width(self) -> int:
    """Width of one attention head, K, also if `head_dim` is 0."""
    return self.head_dim or self.model_dim // self.num_heads

  @property
  def kv_heads(self) -> int:
    """Number of heads of keys and values, also if `num_kv_heads` is 0."""
    return self.num_kv_heads or self.num_heads

  def has_bias(self, projection: str) -> bool:
    """Returns whether a projection of a layer, such as "query", adds a bias."""
    if self.biases == "qkv":
      return projection in ("query", "key", "value")
    return self.biases == "all"

  def block_shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every leaf of one layer, by path.

    For example, "attention/query/kernel" has the shape (`model_dim`,
    `num_heads` * `head_width`).
    """
    model_dim = self.model_dim
    query_width = self.num_heads * self.head_width
    key_width = self.kv_heads * self.head_width
    kernels = {
      "attention/query": (model_dim, query_width),
      "attention/key": (model_dim, key_width),
      "attention/value": (model_dim, key_width),
    }
    if self.activation == "swiglu":
      kernels["mlp/gate"] = (model_dim, self.ff_dim)
    kernels["mlp/up"] = (model_dim, self.ff_dim)
    kernels["attention/output"] = (query_width, model_dim)
    kernels["mlp/down"] = (self.ff_dim, model_dim)
    leaves: dict[str, tuple[int, ...]] = {}
    leaves.update(self._norm_shapes("attention/norm", model_dim))
    leaves.update(self._norm_shapes("mlp/norm", model_dim))
    if self.qk_norm:
      head_width = self.head_width
      leaves.update(self._norm_shapes("attention/query_norm", head_width))
      leaves.update(self._norm_shapes("attention/key_norm", head_width))
    for path, kernel_shape in kernels.items():
      leaves[f"{path}/kernel"] = kernel_shape
      projection = path.split("/")[1]
      if self.has_bias(projection):
        num_outputs = kernel_shape[1]
        leaves[f"{path}/bias"] = (num_outputs,)
    return leaves

  def _norm_shapes(self, path: str, width: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the leaves of a norm of `width` values, by path."""
    shapes: dict[str, tuple[int, ...]] = {f"{path}/scale": (width,)}
    if self.norm == "layer":
      shapes[f"{path}/bias"] = (width,)
    return shapes

  @property
  def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter leaf of the model, by path.

    Leaves of the layers are stacked: their paths begin with "blocks/" and their
    first axis is the layer.
    """
    model_dim = self.model_dim
    leaves: dict[str, tuple[int, ...]] = {
      "embed/embedding": (self.vocab_size, model_dim)
    }
    for path, leaf_shape in self.block_shapes().items():
      leaves[f"blocks/{path}"] = (self.num_layers, *leaf_shape)
    if self.positions == "learned":
      leaves["embed/positions"] = (self.num_positions, model_dim)
    leaves.update(self._norm_shapes("final_norm", model_dim))
    if not self.tied_head:
      leaves["head/kernel"] = (model_dim, self.vocab_size)
    return leaves


def parameter_count(shape: ModelShape) -> int:
  """Returns the number of parameters, including embedding and head.

  Without biases and learned positions the number is

    h V D + D + num_layers (2 D (W + U) + g D F + 2 D + q)

  V is the number of tokens in the vocabulary, D is the width of the residual
  stream, and F is the hidden width of the MLP. The queries have the width W =
  num_heads K, where K is the width of a head. The keys and the values have the
  width U = kv_heads K each. The MLP has g = 3 (SwiGLU) or 2 (GELU, ReLU)
  matrices. The norms of queries and keys have q = 2 K parameters, or 0 without
  QK-norm. There are h = 2 tables of the vocabulary, or 1 if the head is tied.

  Biases and learned positions are counted in addition.

  Source: counted by this project. The matrix terms are those of Hoffmann et al.
  2022, arXiv 2203.15556, appendix F.

  Args:
    shape: Sizes of the model.
  """
  return sum(math.prod(leaf) for leaf in shape.parameter_shapes.values())


def flops_per_token(shape: ModelShape, sequence_length: int) -> int:
  """Returns the floating-point operations to train on one token.

  A multiply-add counts as two operations. Forward and backward pass together
  take

    6 N_mm + 12 num_layers W L

  operations. N_mm is the number of parameters in the kernels of the layers and
  in the output head. If the head is tied, the embedding table is the head. Each
  of these parameters costs one multiply-add forward, and two backward.

  W is the width of the queries, num_heads times the width of a head. In each
  layer, attention (queries times keys, weights times values) costs 4 W L
  operations forward, and 8 W L backward. Positions that the causal mask hides
  are counted, too. The backward pass is assumed to recompute nothing.

  Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
  Differs: the number of parameters in the paper includes the embedding table.

  Args:
    shape: Sizes of the model.
    sequence_length: Number of tokens that attend to each other, L.
  """
  matrix_parameters = sum(
    math.prod(leaf)
    for path, leaf in shape.parameter_shapes.items()
    if path.endswith("/kernel")
    or (shape.tied_head and path.endswith("/embedding"))
  )
  query_width = shape.num_heads * shape.head_width
  attention_flops = 12 * shape.num_layers * query_width * sequence_length
  return 6 * matrix_parameters + attention_flops
