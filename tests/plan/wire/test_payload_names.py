import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from dilocox_jax.plan.choices import loaded
from dilocox_jax.plan.wire.chain import Chain
from dilocox_jax.plan.wire.payload import (
  E3M0,
  FLOATS,
  Dense,
  Int,
  Payload,
)
from dilocox_jax.plan.wire.payload_names import (
  PAYLOADS,
  PayloadKind,
  codec_of,
  named_payload,
  register_codec,
)
from dilocox_jax.plan.wire.reduction import LowRank, RandomMask, TopK


@pytest.mark.parametrize("name", FLOATS)
def test_a_float_type_is_a_name(name):
  assert named_payload(name) == Dense(name)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_part_by_itself_has_its_defaults(name):
  kind = PAYLOADS[name]
  assert named_payload(name) == kind.payload(**kind.fixed)


def test_names_joined_by_a_plus_are_a_chain_in_that_order():
  found = named_payload("random_mask+top_k+int")
  assert found == Chain((RandomMask(), TopK(), Int()))
  assert named_payload("low_rank+float16") == Chain(
    (LowRank(), Dense("float16"))
  )


def test_every_setting_reaches_its_own_part():
  found = named_payload(
    "random_mask+low_rank+top_k+int",
    mask_fraction=0.3,
    rank=5,
    power_iterations=2,
    factorisation="shared",
    top_k_fraction=0.4,
    top_k_block_size=64,
    indices="bitmap",
    bits=2,
    scale="row",
    block_size=32,
    rounding="stochastic",
  )
  assert found == Chain(
    (
      RandomMask(0.3),
      LowRank(5, 2),
      TopK(0.4, 64, "bitmap"),
      Int(2, "row", 32, "stochastic"),
    )
  )


def test_settings_may_be_written_behind_their_link():
  name = "low_rank(rank=5)+top_k(fraction=0.4,block_size=64)+int(scale=row)"
  expected = Chain((LowRank(5), TopK(0.4, 64), Int(2, "row")))
  assert named_payload(name, bits=2) == expected
  assert named_payload("int(scale='row')") == Int(scale="row")
  assert named_payload("int()") == Int()


def test_none_leaves_a_default_and_is_no_setting():
  assert named_payload("e3m0", block_size=None, rank=None) == E3M0()


@pytest.mark.parametrize(
  "name, settings, message",
  [
    ("int5", {}, "name='int5' must be one of float32, "),
    ("", {}, "name='' must be one of float32, "),
    ("low_rank+", {}, "name='' must be one of float32, "),
    ("int", {"rank": 4}, "rank=4 is not a setting of 'int' (it has: bits, "),
    ("float16", {"bits": 4}, "not a setting of 'float16' (it has: none)"),
    ("top_k", {"fraction": 0.1}, "(it has: indices, top_k_block_size, "),
    ("random_mask+top_k", {"mask_fraction": 2.0}, "mask_fraction=2.0 must"),
    ("random_mask+top_k", {"top_k_fraction": 2.0}, "top_k_fraction=2.0 must"),
    ("top_k+int", {"top_k_block_size": 0}, "top_k_block_size=0 must be"),
    ("top_k+int", {"block_size": 0}, "block_size=0 must be"),
    ("int+low_rank", {}, "the chain Int -> LowRank"),
    ("int", {"bits": 3}, "bits=3 must be one of 8, 4, 2, 1"),
    ("int(bits=3)", {}, "bits=3 must be one of 8, 4, 2, 1"),
    ("int(rank=3)", {}, "int has no setting rank (it has: bits, scale, "),
    ("float32(dtype=1)", {}, "float32 has no setting dtype (it has: none)"),
    ("int(bits=2)", {"bits": 4}, "bits of int is set twice: drop one"),
    ("int(2)", {}, "name='int(2)' must be written like 'low_rank(rank=4)+"),
    ("int(bits=2", {}, "name='int(bits=2' must be written like"),
    ("int(bits=f())", {}, "name='int(bits=f())' must be written like"),
    ("int(bits=2)*2", {}, "name='int(bits=2)*2' must be written like"),
    ("low_rank(rank=four)", {}, "rank='four' must be of type int"),
    ("low_rank(rank=2.5)", {}, "rank=2.5 must be of type int"),
    ("top_k(fraction=half)", {}, "fraction='half' must be of type float"),
    ("int(bits={[1]:2})", {}, "must be written like 'low_rank(rank=4)+"),
    ("low_rank", {"rank": "four"}, "rank='four' must be of type int"),
    ("low_rank", {"rank": 2.5}, "rank=2.5 must be of type int"),
    ("int", {"bits": 4.0}, "bits=4.0 must be of type int"),
    ("top_k(fraction=2.0)", {}, "error: fraction=2.0 must be"),
    ("top_k", {"top_k_fraction": 2.0}, "error: top_k_fraction=2.0 must be"),
    ("int(bits=2)+new", {}, "name='new' must be one of float32, "),
  ],
)
def test_an_error_is_one_line_that_names_what_to_change(
  name, settings, message
):
  with pytest.raises(ValueError) as caught:
    named_payload(name, **settings)
  line = f"error: {caught.value}"
  assert message in line and "\n" not in line


def test_numbers_of_numpy_are_numbers():
  settings: dict[str, Any] = {"rank": np.int64(4)}
  given = named_payload("low_rank", **settings)
  assert isinstance(given, LowRank)
  assert given.rank == 4 and type(given.rank) is int


def test_types_that_cannot_be_looked_up_are_not_checked(monkeypatch):
  @dataclasses.dataclass(frozen=True)
  class Half(Payload):
    role = "quantiser"
    share: "OnlyForTypeCheckers" = 0.5  # noqa: F821  # pyright: ignore

    def own_wires(self, leaf):
      return ()

  monkeypatch.setitem(PAYLOADS, "half", PayloadKind(Half, "a:b"))
  assert named_payload("half(share=0.25)") == Half(0.25)


@pytest.mark.parametrize("name", PAYLOADS)
def test_every_codec_of_the_package_can_be_loaded(name):
  assert callable(loaded(PAYLOADS[name].codec))


@dataclasses.dataclass(frozen=True)
class Roleless(Payload):
  def own_wires(self, leaf):
    return ()


class Bare(Payload):
  role = "quantiser"


class Blind(Payload):
  role = "selection"


@pytest.mark.parametrize(
  "name, payload, codec, message",
  [
    ("new", Roleless, "a:b", "role='' must be one of projection, selection, "),
    ("new", Bare, "a:b", "Bare has no own_wires, which a quantiser needs"),
    ("new", Blind, "a:b", "Blind has no carried, which a selection needs"),
    ("new", Int, "int", "codec='int' must be a function or its 'module:name'"),
    ("int", Int, "a:b", "codec 'int' is registered already"),
    ("a+b", Int, "a:b", "codec 'a+b': a name has letters, digits and _"),
  ],
)
def test_a_codec_that_lacks_a_role_is_refused(name, payload, codec, message):
  before = dict(PAYLOADS)
  with pytest.raises(ValueError, match=re.escape(message)) as caught:
    register_codec(name, PayloadKind(payload, codec))
  assert "\n" not in str(caught.value)
  assert dict(PAYLOADS) == before


def test_a_payload_without_a_role_forms_no_chain():
  with pytest.raises(ValueError, match="role of Roleless='' must be one of"):
    Chain((Roleless(),))


def test_a_payload_that_is_not_registered_has_no_codec():
  with pytest.raises(ValueError, match="no codec is registered for Bare: call"):
    codec_of(Bare())
