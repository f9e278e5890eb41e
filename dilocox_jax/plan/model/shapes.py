"""Sizes and parameter shapes of models, known before any array exists.

Payload sizes, fragments, the simulator and the model itself must agree on the
path and shape of every leaf. They stand here without JAX, so that planning a
model of 107 billion parameters costs nothing. A test compares them with the
parameters that the model really has.
"""

import dataclasses
import math

from dilocox_jax.checks import check_limits, limited, within_limits

ACTIVATIONS = ("swiglu", "gelu")


@dataclasses.dataclass(frozen=True)
class ModelShape:
  """The sizes of a decoder-only transformer.

  Attributes:
    num_layers: Transformer blocks (count).
    model_dim: Width of the residual stream, D.
    num_heads: Attention heads, N.
    ff_dim: Hidden width of the MLP, F; for SwiGLU, of each of its two branches.
    vocab_size: Tokens the model knows, V.
    head_dim: Width of one head as configured; 0 means model_dim / num_heads.
      Read `head_width` for the value in force.
    activation: "swiglu" (Shazeer 2020, arXiv 2002.05202) or "gelu".
    qk_norm: Normalise queries and keys of each head before their product
      (Dehghani et al. 2023, arXiv 2302.05442, section 2.1).
    num_kv_heads: Heads of keys and values as configured, each shared by the
      same number of query heads (Ainslie et al. 2023, arXiv 2305.13245); 0
      means num_heads. Read `kv_heads` for the value in force.
    tied_head: Whether the head is the token table, not a matrix of its own.
  """

  num_layers: int
  model_dim: int
  num_heads: int
  ff_dim: int
  vocab_size: int
  head_dim: int = limited(0, at_least=0)
  activation: str = limited("swiglu", choices=ACTIVATIONS)
  qk_norm: bool = False
  num_kv_heads: int = limited(0, at_least=0)
  tied_head: bool = False

  def __post_init__(self):
    """Raises ValueError, naming the values, if no such model can be built."""
    for name in "num_layers model_dim num_heads ff_dim vocab_size".split():
      within_limits(name, getattr(self, name), at_least=1)
    check_limits(self)
    if not self.head_dim and self.model_dim % self.num_heads:
      raise ValueError(
        f"model_dim={self.model_dim} must be divisible by "
        f"num_heads={self.num_heads}, or head_dim be given"
      )
    if self.num_heads % self.kv_heads:
      raise ValueError(
        f"num_kv_heads={self.num_kv_heads} must divide "
        f"num_heads={self.num_heads}"
      )
    if self.head_width % 2:
      raise ValueError(
        f"head width {self.head_width} (head_dim={self.head_dim}, "
        f"model_dim={self.model_dim} / num_heads={self.num_heads}) must be "
        "even: rotary positions turn pairs"
      )

  @property
  def head_width(self) -> int:
    """Width of one attention head, K."""
    return self.head_dim or self.model_dim // self.num_heads

  @property
  def kv_heads(self) -> int:
    """Number of heads of keys, and of values."""
    return self.num_kv_heads or self.num_heads


def _block_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
  d, f = shape.model_dim, shape.ff_dim
  k = shape.head_width
  heads = shape.num_heads * k
  leaves: dict[str, tuple[int, ...]] = {"attention/norm/scale": (d,)}
  leaves["attention/query/kernel"] = (d, heads)
  for name in ("key", "value"):
    leaves[f"attention/{name}/kernel"] = (d, shape.kv_heads * k)
  if shape.qk_norm:
    leaves |= {f"attention/{n}_norm/scale": (k,) for n in ("query", "key")}
  leaves |= {"attention/output/kernel": (heads, d), "mlp/norm/scale": (d,)}
  if shape.activation == "swiglu":
    leaves["mlp/gate/kernel"] = (d, f)
  return leaves | {"mlp/up/kernel": (d, f), "mlp/down/kernel": (f, d)}


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
  """Lists every parameter leaf of the model.

  Args:
    shape: The model.

  Returns:
    Path ("/" between keys) to shape. Leaves of all blocks are stacked: their
    paths begin with "blocks/" and their first axis is the layer.
  """
  layers, d, v = shape.num_layers, shape.model_dim, shape.vocab_size
  blocks = {
    f"blocks/{path}": (layers, *leaf)
    for path, leaf in _block_shapes(shape).items()
  }
  leaves = {"embed/embedding": (v, d), **blocks, "final_norm/scale": (d,)}
  return leaves if shape.tied_head else leaves | {"head/kernel": (d, v)}


def parameter_count(shape: ModelShape) -> int:
  """Counts all parameters: the sum over leaves of the product of their sizes.

  With W = N K, U = W for keys and values of every head (less where heads share
  them), g = 3 (SwiGLU) or 2 (GELU) matrices in the MLP, q = 2 K with QK-norm,
  else 0, and h = 2 tables, 1 where head and embedding are tied:

    h V D + D + num_layers (2 D (W + U) + g D F + 2 D + q)

  Source: counting; the matrix terms are those of Hoffmann et al. 2022, arXiv
  2203.15556, appendix F, and the projections are free of biases.

  Args:
    shape: The model.

  Returns:
    Number of scalars, embedding and head included.
  """
  return sum(math.prod(leaf) for leaf in parameter_shapes(shape).values())


def flops_per_token(shape: ModelShape, sequence_length: int) -> int:
  """Floating-point operations to train on one token, forward and backward.

    6 N_mm + 12 num_layers W L,    W = N K

  N_mm counts the parameters that are multiplied as matrices: all but the
  norms and the embedding table, which is looked up unless it is the head too.
  Each costs one multiply and one add forward and twice that backward.
  Attention multiplies queries with keys and weights with values, 4 W L forward
  and twice that backward; the causal mask is not credited, and nothing is
  recomputed.

  Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
  Differs: the paper's N includes the embedding; ours is only looked up, unless
  it is the head too.

  Args:
    shape: The model.
    sequence_length: Tokens that attend to each other, L.

  Returns:
    Operations per token; a multiply-add counts as two.
  """
  matrix_parameters = sum(
    math.prod(leaf)
    for path, leaf in parameter_shapes(shape).items()
    if path.endswith("/kernel")
    or (shape.tied_head and path.endswith("/embedding"))
  )
  attention = shape.num_layers * shape.num_heads * shape.head_width
  return 6 * matrix_parameters + 12 * attention * sequence_length
