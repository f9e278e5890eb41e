import sys

import pytest

from dilocox_jax import checks
from dilocox_jax.data import tokenizers


def test_a_value_outside_the_choices_is_answered_with_them():
  checks.one_of("bits", 4, (8, 4))
  with pytest.raises(ValueError, match="bits=3 must be one of 8, 4"):
    checks.one_of("bits", 3, (8, 4))


def test_an_unknown_name_is_answered_with_the_nearest():
  checks.known("method", "diloco", ["diloco", "eager"])
  with pytest.raises(ValueError, match="did you mean 'diloco'"):
    checks.known("method", "dilocoo", ["diloco", "eager"])
  with pytest.raises(ValueError, match="have: diloco, eager"):
    checks.known("method", "xyz", ["diloco", "eager"])


@pytest.mark.parametrize(
  "limits, allowed, refused, message",
  [
    ({"at_least": 0}, 0, -0.1, "must be at least 0"),
    ({"at_least": 0, "at_most": 1}, 1, 1.1, "must be at least 0 and at most 1"),
    ({"at_most": 1}, 0.5, float("nan"), "must be at most 1"),
    ({"above": 0}, 1, 0, "must be above 0"),
    ({"above": 0}, 1, float("nan"), "must be above 0"),
    ({"above": 0, "below": 1}, 0.5, 1.0, "must be above 0 and below 1"),
    ({"choices": ("a", "b")}, "a", "c", "must be one of a, b"),
  ],
)
def test_a_value_outside_its_limits_is_named_with_them(
  limits, allowed, refused, message
):
  checks.within_limits("inner.b1", allowed, **limits)
  with pytest.raises(ValueError, match=f"inner.b1='?{refused}'? {message}"):
    checks.within_limits("inner.b1", refused, **limits)


def test_a_section_is_put_in_front_of_a_message():
  with pytest.raises(ValueError, match="^sync.rule='x' is wrong$"):
    with checks.in_front("sync."):
      raise ValueError("rule='x' is wrong")


@pytest.mark.parametrize(
  "text",
  ["", "[]", "null", '{"a"', "[" * 10**5, '{"n": ' + "9" * 5000, b"\xff"],
)
def test_what_is_no_json_object_is_one_line(text):
  with pytest.raises(ValueError, match="^run.json is no JSON object") as error:
    checks.json_object(text, "run.json")
  assert "\n" not in str(error.value)


def test_a_package_that_is_there_is_imported():
  assert checks.extra_package("tokenizers", "this test").Tokenizer


def test_a_package_that_is_missing_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  monkeypatch.setenv("DILOCOX_JAX_CACHE", "")
  said = "data.tokenizer needs the package tokenizers: pip install"
  with pytest.raises(ValueError, match=said):
    tokenizers.trained_bpe([b"text"], 300)


def test_a_module_of_a_missing_package_is_named_by_its_package(monkeypatch):
  monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
  said = r"x needs the package safetensors: pip install 'dilocox_jax\[weights"
  with pytest.raises(ValueError, match=said):
    checks.extra_package("safetensors.numpy", "x", "weights")
