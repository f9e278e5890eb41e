import pytest

from dilocox_jax.aggregators.kinds import EXCHANGES
from dilocox_jax.codecs.named import CODECS
from dilocox_jax.config.recipes import RECIPES
from dilocox_jax.data.sources import SOURCES
from dilocox_jax.optimizers import OPTIMIZERS
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.schedule.methods import METHODS, RULES
from tests.extensions import (
  gossip,
  growing,
  halfway,
  lookahead,
  running_mean,
  sums,
  ternary,
)


def _registered(extension, *registries):
  """A fixture in which an extension is registered, and then no more."""

  @pytest.fixture
  def fixture():
    own = [dict(registry) for registry in registries]
    extension.register()
    yield
    for registry, parts in zip(registries, own, strict=True):
      registry.clear()
      registry.update(parts)

  return fixture


ternary_registered = _registered(ternary, CODECS)
gossip_registered = _registered(gossip, EXCHANGES)
lookahead_registered = _registered(lookahead, OPTIMIZERS)
sums_registered = _registered(sums, SOURCES)
model_registered = _registered(running_mean, MODEL_PRESETS)
halfway_registered = _registered(halfway, RULES)
growing_registered = _registered(growing, METHODS, RECIPES)
