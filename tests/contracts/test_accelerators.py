"""What inner steps are on accelerators, read from programs lowered for them.

JAX lowers a program for devices that are not there. So these tests need no
accelerator, and they say nothing about speed or about what XLA makes of it.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.export import DisabledSafetyCheck

from dilocox_jax.config import from_mapping
from dilocox_jax.training import build
from experiments.tools.bench_inner import first_carry, steps_program
from tests.tiers import slow

LENGTH = 2048
BATCH = 4
VOCAB = 32_000
STEPS = 2
TOKENS = BATCH * LENGTH
SHAPE = {"num_layers": 4, "model_dim": 256, "num_heads": 4, "num_kv_heads": 2}
SHAPE |= {"ff_dim": 512, "vocab_size": VOCAB}
KERNELS = {"cuda": "__cudnn$fmhaSoftmax", "tpu": "tpu_custom_call"}
MESH = {"layout": "mesh"}
CHUNKS = {"loss_chunk_tokens": 1024}  # A GPU's default is more than `TOKENS`.
STAGES = MESH | {"num_stages": 2, "num_replicas": 2}

_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)>")
_PRODUCT = re.compile(r"stablehlo\.dot_general.*: \((\S+), .*\) -> (\S+)")
_SUM = re.compile(
  r"stablehlo\.reduce.*applies stablehlo\.add.*: \((tensor<\S+)"
)


def lowered(monkeypatch, platform, data=(), mesh=(), of="inner steps", **model):
  """Text of inner steps, or an evaluation, as JAX hands it to XLA."""
  # JAX asks for the version of cuDNN on this machine, which needs none.
  monkeypatch.setattr(
    "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version",
    lambda: 91_000,
  )
  config = from_mapping(
    {
      "model": SHAPE | model,
      "data": {"batch_size": BATCH, "sequence_length": LENGTH, **dict(data)},
      "inner": {"accumulate_steps": 2} if "num_stages" in dict(mesh) else {},
      "mesh": dict(mesh),
    }
  )
  end = 0 if config.data.document_masks else None
  name = "gpu" if platform == "cuda" else platform
  programs = build.programs(config, end_of_text=end, platform=name)
  replicas = programs.rounds.replicas
  if of == "evaluation":
    params = jax.eval_shape(programs.model.init, jax.random.key(0))
    batches = jax.ShapeDtypeStruct((STEPS, BATCH, LENGTH + 1), jnp.int32)
    params = replicas.abstract(params, None)
    return _text(programs.evaluate, platform, params, batches)

  carry = jax.eval_shape(lambda: first_carry(programs))
  shapes = replicas.abstract(carry, 0)
  batches = jax.ShapeDtypeStruct((2, STEPS, BATCH, LENGTH + 1), jnp.int32)
  return _text(steps_program(programs), platform, shapes, batches)


def _text(program: Any, platform, *shapes):
  calls = [KERNELS["cuda"], KERNELS["cuda"] + "Backward"]
  exported = jax.export.export(
    program,
    platforms=[platform],
    disabled_checks=[DisabledSafetyCheck.custom_call(name) for name in calls],
  )(*shapes)
  return exported.mlir_module()


def shapes_in(text):
  """Shapes of all values, as sorted lists of dimensions."""
  return [
    sorted(map(int, dims.split("x")[:-1]))
    for dims, _ in set(_TENSOR.findall(text))
  ]


def holds_weights(text):
  """Whether a value has the length of a sequence twice."""
  return any(shape.count(LENGTH) > 1 for shape in shapes_in(text))


def holds_logits(text):
  """Whether a value has the logits of all tokens of a replica."""
  shapes = [shape for shape in shapes_in(text) if VOCAB in shape]
  assert shapes
  largest = max(jnp.prod(jnp.array(s, jnp.float32)) for s in shapes)
  return bool(largest >= TOKENS * VOCAB)


CASES = [
  ("cuda", {"mesh": {"stacked_by": "map"}, **CHUNKS}),
  ("tpu", {"data": {"document_masks": True}}),
  ("cuda", {"mesh": STAGES, **CHUNKS}),
  *slow(
    ("tpu", {"mesh": MESH}),
    ("tpu", {"mesh": STAGES, "data": {"document_masks": True}}),
  ),
]


@pytest.mark.parametrize(("platform", "options"), CASES)
def test_steps_have_fused_attention_and_narrow_products(
  monkeypatch, platform, options
):
  text = lowered(monkeypatch, platform, **options)
  assert KERNELS[platform] in text
  assert not holds_weights(text) and not holds_logits(text)
  wide = []
  narrow = []
  for factor, result in _PRODUCT.findall(text):
    kind = narrow if "bf16" in factor else wide
    kind.append((factor.count("x"), result.count("x")))
  assert len(narrow) > 8
  # A product that loses a dimension only adds up rows, once, in fp32.
  assert all(result < factor for factor, result in wide)
  sums = {_TENSOR.findall(kind)[0][1] for kind in _SUM.findall(text)}
  assert "f32" in sums and "bf16" not in sums
  # Parameters and the optimizer's state come in and go out in fp32.
  main = next(line for line in text.splitlines() if "@main(" in line)
  assert {kind for _, kind in _TENSOR.findall(main)} == {"f32", "i32"}


@pytest.mark.parametrize(("platform", "mesh"), [("tpu", {}), ("cuda", STAGES)])
def test_evaluations_have_fused_attention_wherever_they_run(
  monkeypatch, platform, mesh
):
  text = lowered(monkeypatch, platform, mesh=mesh, of="evaluation", **CHUNKS)
  assert KERNELS[platform] in text
  assert not holds_weights(text) and not holds_logits(text)


def test_what_is_looked_for_is_found_where_it_is(monkeypatch):
  options = {"attention": "plain", "loss_chunk_tokens": 0}
  text = lowered(monkeypatch, "tpu", **options, compute_dtype="float32")
  assert KERNELS["tpu"] not in text
  assert holds_weights(text) and holds_logits(text)
  assert not any("bf16" in factor for factor, _ in _PRODUCT.findall(text))
  # Single precision on a GPU has no fused attention, and no whole weights.
  text = lowered(monkeypatch, "cuda", compute_dtype="float32")
  assert KERNELS["cuda"] not in text and not holds_weights(text)
