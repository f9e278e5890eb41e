"""Models by name, so that configs, tests and tables mean the same sizes.

A preset is only a `ModelShape`: it can be counted, planned and simulated
without building anything.
"""

from dilocox_jax.plan.shapes import ModelShape

BYTE_VOCABULARY = 256

# The project's default: it trains to something readable in minutes on two CPU
# cores. With F = 344, SwiGLU's three matrices weigh what GELU's two do at 4 D.
tiny = ModelShape(
  num_layers=4,
  model_dim=128,
  num_heads=4,
  ff_dim=344,
  vocab_size=BYTE_VOCABULARY,
)

# For tests: small enough for loops in numpy, large enough to have two of
# everything that is stacked.
nano = ModelShape(
  num_layers=2,
  model_dim=16,
  num_heads=2,
  ff_dim=24,
  vocab_size=BYTE_VOCABULARY,
)

PRESETS: dict[str, ModelShape] = {"tiny": tiny, "nano": nano}
