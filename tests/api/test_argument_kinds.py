import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.aggregators.mean import (
  mean_of_finite_replicas,
)
from dilocox_jax.api import argument_kinds as kinds
from dilocox_jax.plan.schedule import methods

RIGHT = [
  (kinds.check_method, methods.diloco(4)),
  (lambda part: kinds.check_optimizer("inner", part), optax.adamw(1e-3)),
  (kinds.check_exchange, mean_of_finite_replicas("replica")),
  (kinds.check_config, dx.RunConfig()),
]


@pytest.mark.parametrize(("check", "part"), RIGHT)
def test_what_is_meant_passes(check, part):
  check(part)


@pytest.mark.parametrize("check", [check for check, _ in RIGHT])
@pytest.mark.parametrize("part", ["diloco", None, {"w": np.zeros((3, 3))}])
def test_anything_else_is_refused_in_one_line(check, part):
  with pytest.raises(TypeError, match="must be") as raised:
    check(part)
  assert "\n" not in str(raised.value)


def test_half_an_optimizer_is_none():
  class Half:
    def update(self, grads, state, params):
      return grads, state

  with pytest.raises(TypeError, match="must be an optax transformation"):
    kinds.check_optimizer("outer", Half())
