"""A codec outside the package does all that one inside does."""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.codecs.compose import encoder
from dilocox_jax.plan.wire.chain import Chain, Encoding, num_bytes
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Wire, group_shape
from dilocox_jax.plan.wire.payload_names import (
  PayloadKind,
  named_payload,
  register_codec,
)
from dilocox_jax.plan.wire.reduction import LowRank, TopK
from tests.contracts import test_bytes, test_codecs
from tests.extensions import runs, ternary
from tests.extensions.ternary import Ternary

pytestmark = pytest.mark.usefixtures("ternary_registered")

BLOCK_SIZE = 100
PROMISES = {
  name: check
  for name, check in vars(test_codecs).items()
  if name.startswith("test_")
  and "stochastic" not in name
  and list(inspect.signature(check).parameters) == ["name"]
}
CODECS = {
  "ternary": Ternary(BLOCK_SIZE),
  "low_rank+ternary": Chain((LowRank(2), Ternary(BLOCK_SIZE))),
  "top_k+ternary": Chain((TopK(0.3, BLOCK_SIZE), Ternary(BLOCK_SIZE))),
}


def recovered(payload, values, leaf):
  """The square of the scale comes back, times the values that are not zero."""
  groups, width = group_shape(leaf, "block", payload.block_size)
  sizes = np.abs(test_codecs.in_blocks(values, groups, width))
  least = payload.threshold * sizes.mean(axis=-1, keepdims=True)
  is_sent = (sizes >= least) & (sizes > 0)
  count = np.maximum(is_sent.sum(axis=-1), 1)
  scale = np.where(is_sent, sizes, 0).sum(axis=-1) / count
  # The scale is rounded to 9 bits, and a tie may be decided otherwise.
  return (1 - 2.0**-10) * float(np.sum(count * scale**2))


@pytest.mark.parametrize("promise", PROMISES)
def test_it_keeps_what_every_codec_promises(promise, monkeypatch):
  monkeypatch.setitem(test_codecs.BOUNDS, Ternary, recovered)
  monkeypatch.setitem(test_codecs.CODECS, "ternary", CODECS["ternary"])
  PROMISES[promise]("ternary")


def test_the_suite_of_promises_is_not_empty():
  assert len(PROMISES) >= 8


@pytest.mark.parametrize("name", ["low_rank+ternary", "top_k+ternary"])
def test_it_ends_chains_of_the_packages_own_links(name, monkeypatch):
  monkeypatch.setitem(test_codecs.BOUNDS, Ternary, recovered)
  monkeypatch.setitem(test_codecs.CODECS, name, CODECS[name])
  check = "test_arrays_that_are_really_sent_have_the_predicted_bytes"
  PROMISES[check](name)


@pytest.mark.parametrize("num_replicas, collective", [(2, "auto"), (3, "auto")])
def test_an_exchange_moves_the_planned_bytes(num_replicas, collective):
  check = test_bytes.test_an_exchange_moves_the_bytes_of_the_plan
  check(Ternary(), collective, num_replicas, 1)


def test_three_replicas_scatter_it_as_they_do_codes():
  method = runs.config(codec={"name": "ternary"}).sync.named
  plan = test_bytes.traffic(method, Ternary(), "auto", 3)
  kinds = [each.kind for each in plan.exchange(0)]
  assert sorted(kinds) == ["all_gather", "all_to_all"]


def test_by_hand():
  # The mean size is 2.2 and the threshold 1.54: 3, -4 and 2 remain.
  values = jnp.asarray([[1.0, 3.0, -4.0, 2.0, -1.0]])
  payload = Ternary()
  coder = encoder(Encoding((payload,)), Leaf(1, (5,)))
  codes, scales = coder.encode(values, jax.random.key(0))
  assert codes.tolist() == [[[1 + 2 * 3 + 0 * 9 + 2 * 27 + 1 * 81]]]
  assert scales.tolist() == [[[3.0]]]
  assert coder.decode((codes, scales)).tolist() == [[0, 3, -3, 3, 0]]
  assert num_bytes(payload, {"w": (5,)}) == 3


def test_its_settings_are_its_own():
  assert named_payload("ternary", block_size=32) == Ternary(32)
  with pytest.raises(ValueError, match="it has: block_size, threshold"):
    named_payload("ternary", bits=2)


def test_a_run_that_names_it_trains_and_is_simulated():
  config = runs.config(
    sync={"method": "diloco", "sync_interval": 3},
    codec={"name": "ternary(threshold=0.6)"},
    exchange={"error_feedback": True},
  )
  assert config.codec.payload == Ternary(threshold=0.6)
  runs.assert_it_trains(config)
  plain = runs.config(sync={"method": "diloco", "sync_interval": 3})
  share = runs.simulated(config).sent_bytes / runs.simulated(plain).sent_bytes
  # A fifth of a byte and a 64th of two bytes, instead of 4 bytes.
  assert math.isclose(share, (1 / 5 + 2 / 128) / 4, rel_tol=0.1)


@dataclasses.dataclass(frozen=True)
class Uncounted(Ternary):
  """Describes one byte a layer, whatever its encoder makes."""

  def own_wires(self, leaf):
    return (Wire("codes", (leaf.num_layers, 1, 1), 1),)


def test_arrays_that_a_payload_does_not_describe_are_refused():
  register_codec("uncounted", PayloadKind(Uncounted, ternary.encoder))
  tx = dx.diloco(
    *(optax.sgd(0.1), optax.sgd(0.7)), sync_interval=1, codec="uncounted"
  )
  params = {"w": jnp.ones((2, 40))}
  state = jax.vmap(tx.init)(params)
  message = "encoder of Uncounted sends 10 bytes .* its payload counts 1: own_w"
  with pytest.raises(ValueError, match=message):
    jax.vmap(tx.update, axis_name="replica")(params, state, params)
