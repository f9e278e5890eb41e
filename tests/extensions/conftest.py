from typing import Any

import pytest

from dilocox_jax.aggregators.kinds import EXCHANGES
from dilocox_jax.codecs.named import CODECS
from dilocox_jax.config.recipes import RECIPES
from dilocox_jax.data.sources import SOURCES
from dilocox_jax.optimizers import OPTIMIZERS
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.schedule.methods import METHODS, RULES
from tests.extensions import gossip, growing, parts, ternary

REGISTRIES: tuple[Any, ...] = (
  CODECS,
  EXCHANGES,
  METHODS,
  MODEL_PRESETS,
  OPTIMIZERS,
  RECIPES,
  RULES,
  SOURCES,
)


@pytest.fixture(autouse=True)
def registered():
  """All extensions, and afterwards only what was there before."""
  before = [dict(registry) for registry in REGISTRIES]
  for extension in (ternary, gossip, growing, parts):
    extension.register()
  yield
  for registry, own in zip(REGISTRIES, before, strict=True):
    registry.clear()
    registry.update(own)
