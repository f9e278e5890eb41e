"""Any optax transformation takes the outer step, by name or as it is."""

from typing import Any

import jax
import optax
import pytest

from dilocox_jax.optimizers import (
  OPTIMIZERS,
  named_optimizer,
  register_optimizer,
)
from tests.extensions import lookahead, runs

pytestmark = pytest.mark.usefixtures("lookahead_registered")


def config():
  return runs.config(
    sync={"method": "diloco", "sync_interval": 3},
    outer={"optimizer": "clipped_momentum", "learning_rate": 0.9},
  )


def test_a_run_that_names_it_trains_and_is_simulated():
  programs, state = runs.assert_it_trains(config())
  counts = optax.tree.get_all_with_path(state.fragments[0].optimizer, "count")
  assert [int(count) for _, count in counts] == [4]
  assert runs.simulated(config()).num_steps == 12


def test_its_name_builds_it_with_the_options_that_it_has():
  built = named_optimizer("clipped_momentum", 0.5, momentum=0.3, nesterov=True)
  params = {"w": jax.numpy.asarray([3.0, 4.0])}
  updates: Any = built.update(params, built.init(params), params)[0]
  assert updates["w"].tolist() == pytest.approx([-0.3, -0.4])


@pytest.mark.parametrize(
  "name, build, message",
  [
    ("sgd", optax.sgd, "optimizer 'sgd' is optax's own: take another name"),
    ("new", optax.clip, "optimizer 'new' must have an argument learning_rate"),
    (
      "clipped_momentum",
      lookahead.clipped_momentum,
      "optimizer 'clipped_momentum' is registered already",
    ),
  ],
)
def test_what_is_no_optimizer_is_refused(name, build, message):
  before = dict(OPTIMIZERS)
  with pytest.raises(ValueError, match=message):
    register_optimizer(name, build)
  assert dict(OPTIMIZERS) == before
