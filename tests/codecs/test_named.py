import re

import pytest

from dilocox_jax.codecs.base import Quantizer
from dilocox_jax.codecs.low_rank import LocalLowRank, LowRank
from dilocox_jax.codecs.named import (
  CODECS,
  link_names,
  named_codec,
  register_codec,
  split_links,
)
from dilocox_jax.codecs.quantize import E3M0, Float, Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.plan.choices import loaded

INTS = Int(2, "row", 32)


@pytest.mark.parametrize(
  ("text", "codec"),
  [
    *((name, loaded(place)()) for name, place in CODECS.items()),
    ("random_mask+top_k+int", RandomMask(then=TopK(then=Int()))),
    ("low_rank + float16", LowRank(then=Float("float16"))),
    ("local_low_rank+int()", LocalLowRank(then=Int())),
    (
      "random_mask(fraction=0.3)"
      "+top_k(fraction=0.4,block_size=64,indices=bitmap)"
      "+int(bits=2,scale='row',block_size=32)",
      RandomMask(0.3, TopK(0.4, 64, "bitmap", INTS)),
    ),
    ("low_rank(rank=5,power_iterations=2)", LowRank(5, 2)),
    ("e3m0(block_size=16)", E3M0(16)),
  ],
)
def test_names_joined_by_a_plus_are_a_chain_with_its_settings(text, codec):
  assert named_codec(text) == codec
  names = [name for name, _ in split_links(text)]
  assert link_names(text) == "+".join(names)


LIKE = "must be written like 'low_rank(rank=4)+int(bits=2)'"


@pytest.mark.parametrize(
  "text, message",
  [
    ("int5", "codec='int5' must be one of float32, "),
    ("int4", "joined by '+': did you mean 'int(bits=4)'?"),
    ("2bits", "codec='2bits' must be written like"),
    ("bf16+int", "did you mean 'bfloat16'?"),
    ("topk", "did you mean 'top_k'?"),
    ("int(bit=4)", "int has no setting bit (it has: bits, scale, "),
    ("int(bit=4)", "did you mean 'bits'?"),
    ("", f"codec='' {LIKE}"),
    ("int(2)", f"codec='int(2)' {LIKE}"),
    ("int(bits=f())", LIKE),
    ("int(**{'bits': 2})", LIKE),
    ("int(rank=3)", "int has no setting rank (it has: bits, scale, "),
    ("top_k(then=int)", "top_k has no setting then (it has: fraction, "),
    ("low_rank(rank=four)", "low_rank: rank='four' must be of type int"),
    ("top_k(fraction=2.0)", "top_k: fraction=2.0 must be above 0 and at most"),
    ("top_k(indices=runs)", "indices='runs' must be one of packed, bitmap"),
    ("int+top_k", "int must be the last link of a codec"),
    ("top_k+low_rank+int", "LowRank cannot follow TopK: shared low rank or "),
  ],
)
def test_an_error_is_one_line_that_names_what_to_change(text, message):
  with pytest.raises(ValueError) as caught:
    named_codec(text)
  assert message in str(caught.value) and "\n" not in str(caught.value)


class Bare(Quantizer):
  pass


@pytest.mark.parametrize(
  "name, codec, message",
  [
    ("new", Bare, "Bare must be a dataclass derived from dilocox_jax.Quanti"),
    ("new", "int", "codec 'new'='int' must be a function or its 'module:name'"),
    ("int", Int, "codec 'int' is registered already"),
    ("a+b", Int, "codec 'a+b': a name has letters, digits and _"),
  ],
)
def test_what_is_no_codec_is_not_registered(name, codec, message):
  before = dict(CODECS)
  with pytest.raises(ValueError, match=re.escape(message)) as caught:
    register_codec(name, codec)
  assert "\n" not in str(caught.value)
  assert dict(CODECS) == before
