"""A codec outside the package does all that one inside does."""

import math

import jax
import jax.numpy as jnp
import pytest

import dilocox_jax as dx
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.sparse import TopK
from tests.contracts import test_bytes, test_codecs
from tests.extensions import runs
from tests.extensions.ternary import Ternary

ROW_SIZE = 100
# Each with the share of the energy that it loses of values of N(0, 1), and the
# largest share of any input (measured).
CODECS = {
  "ternary": (Ternary(ROW_SIZE), 0.2096, 0.74),
  "low_rank+ternary": (LowRank(2, then=Ternary(ROW_SIZE)), 0.8, 0.9),
  "top_k+ternary": (TopK(0.3, ROW_SIZE, then=Ternary(ROW_SIZE)), 0.3173, 0.71),
}


@pytest.mark.parametrize("name", CODECS)
def test_it_keeps_what_every_codec_promises(name):
  test_codecs.keeps_its_promises(*CODECS[name])


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_an_exchange_moves_the_planned_bytes(num_replicas):
  check = test_bytes.test_an_exchange_moves_the_bytes_of_the_plan
  check(Ternary(), "auto", num_replicas, 1)


def test_by_hand():
  # The mean size is 2.2 and the threshold 1.54: 3, -4 and 2 remain.
  values = jnp.asarray([[1.0, 3.0, -4.0, 2.0, -1.0]])
  codes, scales = Ternary().encode([values], jax.random.key(0))
  assert codes.tolist() == [[[1 + 2 * 3 + 0 * 9 + 2 * 27 + 1 * 81]]]
  assert scales.tolist() == [[[3.0]]]
  [found] = Ternary().decode((codes, scales), [values.shape])
  assert found.tolist() == [[0, 3, -3, 3, 0]]


def test_its_settings_are_its_own():
  assert dx.named_codec("ternary(row_size=32)") == Ternary(32)
  with pytest.raises(ValueError, match="it has: row_size, threshold"):
    dx.named_codec("ternary(bits=2)")
  with pytest.raises(ValueError, match="row_size=0 must be at least 1"):
    dx.named_codec("ternary(row_size=0)")


def test_a_run_that_names_it_trains_and_is_simulated():
  config = runs.config(
    sync={"method": "diloco", "sync_interval": 3},
    exchange={"codec": "ternary(threshold=0.6)", "feedback": 1.0},
  )
  assert config.exchange.named_codec == Ternary(threshold=0.6)
  runs.assert_it_trains(config)
  plain = runs.config(sync={"method": "diloco", "sync_interval": 3})
  share = runs.simulated(config).sent_bytes / runs.simulated(plain).sent_bytes
  # A fifth of a byte and a 128th of two bytes, instead of 4 bytes. Three
  # replicas fill the slices of small leaves with rows of zeros.
  assert math.isclose(share, (1 / 5 + 2 / 128) / 4, rel_tol=0.15)
