"""Checks of values and mappings, of trees, and files that are no links."""

import dataclasses
import os
import re
import sys

import jax.numpy as jnp
import pytest

from dilocox_jax import checks, files
from dilocox_jax.checks import (
  changed_fields,
  check_path,
  dataclass_from,
  flat,
  unflat,
)
from dilocox_jax.trees import all_finite, leaves_by_path


@pytest.mark.parametrize(
  "limits, allowed, refused, message",
  [
    ({"at_least": 0}, 0, -0.1, "must be at least 0"),
    ({"at_least": 0, "at_most": 1}, 1, 1.1, "must be at least 0 and at most 1"),
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


@dataclasses.dataclass
class Limits:
  count: int = checks.limited(2, at_least=1)
  share: float | None = checks.limited(None, above=0, below=1)


def test_a_limit_of_a_field_is_one_of_its_type_too():
  for right in (Limits(), Limits(count=3, share=0.5)):
    checks.check_limits(right)
  for name, wrong in (("count", 2.5), ("count", True), ("share", True)):
    limits = Limits()
    setattr(limits, name, wrong)
    with pytest.raises(ValueError, match=f"^a.{name}={wrong} must be of type"):
      checks.check_limits(limits, "a.")


def test_an_unknown_name_is_answered_with_the_nearest():
  checks.known("method", "diloco", ["diloco", "eager"])
  for name, answer in (("dilocoo", "you mean 'diloco'"), ("x", "have: diloco")):
    with pytest.raises(ValueError, match=f"^sync.unknown method .*{answer}"):
      with checks.in_front("sync."):
        checks.known("method", name, ["diloco", "eager"])


@pytest.mark.parametrize(
  "text",
  ["", "[]", "null", '{"a"', "[" * 10**5, '{"n": ' + "9" * 5000, b"\xff"],
)
def test_what_is_no_json_object_is_one_line(text):
  with pytest.raises(ValueError, match="^run.json is no JSON object") as error:
    checks.json_object(text, "run.json")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ('{"a": NaN}', "NaN is no number"),
    ('{"a": [-Infinity]}', "-Infinity is no number"),
    ('{"a": 1e999}', "'1e999' is out of range"),
    ('{"a": {"b": 1, "c": 2, "b": 1}}', "the key 'b' more than once"),
  ],
)
def test_what_python_reads_and_we_never_write_is_damage(text, said):
  with pytest.raises(ValueError, match="^run.json is no JSON object") as error:
    checks.json_object(text, "run.json")
  assert said in str(error.value)
  assert checks.json_object(text, "run.json", is_ours=False)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
  path = tmp_path / "x.json"

  def refused(said):
    with pytest.raises(ValueError, match="x.json") as error:
      checks.json_file(path)
    assert said in str(error.value) and "\n" not in str(error.value)

  refused("cannot be read (No such file or directory)")
  path.mkdir()
  refused("x.json is no file")
  path.rmdir()
  os.mkfifo(path)  # To read it would wait for a writer.
  refused("x.json is no file")
  path.unlink()
  with path.open("wb") as file:
    file.truncate(2**40)  # It has no content on the disk, but in memory.
  refused("x.json has 1,099,511,627,776 bytes, and 67,108,864 at most are read")
  path.write_text('{"a": 1}')
  assert checks.json_file(path) == {"a": 1}


def test_a_long_value_is_not_repeated_as_a_whole():
  for value in ("x" * 10**6, list(range(10**5))):
    with pytest.raises(ValueError, match=r"characters\) must be") as error:
      checks.of_type("name", value, int)
    assert len(str(error.value)) < 200
  with pytest.raises(ValueError, match="rate=1000.*is too large"):
    checks.of_type("rate", 10**400, float)


def test_a_module_of_a_missing_package_is_named_by_its_package(monkeypatch):
  monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
  said = r"x needs the package safetensors: pip install 'dilocox_jax\[weights"
  with pytest.raises(ValueError, match=said):
    checks.extra_package("safetensors.numpy", "x", "weights")


@dataclasses.dataclass(frozen=True)
class Engine:
  power: float = 1.5
  cylinders: int | None = None
  share: float | None = None
  is_loud: bool = False


@dataclasses.dataclass(frozen=True)
class Car:
  name: str = "small"
  wheels: int = 4
  engine: Engine = Engine()

  def __post_init__(self):
    if self.wheels < 3:
      raise ValueError(f"wheels={self.wheels} are too few")


def test_what_is_set_is_set_and_the_rest_is_default():
  assert dataclass_from(Car, {}) == Car()
  built = dataclass_from(Car, {"wheels": 3, "engine": {"cylinders": 6}})
  assert built == Car(wheels=3, engine=Engine(cylinders=6))
  assert dataclass_from(Engine, {"cylinders": None, "share": None}) == Engine()
  for path in "name", "engine", "engine.power":
    check_path(Car, path)
  with pytest.raises(ValueError, match="'engine.powr': did you mean 'power'"):
    check_path(Car, "engine.powr")
  for name in ("power", "share"):  # A whole number serves as a float.
    value = getattr(dataclass_from(Car, {"engine": {name: 2}}).engine, name)
    assert type(value) is float and value == 2


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"wheel": 3}, "unknown config field 'wheel': did you mean 'wheels'?"),
    ({"engine": {"cilinders": 3}}, "field 'engine.cilinders': did you mean 'c"),
    ({"engine": {"wheel": 3}}, "'engine.wheel': did you mean 'wheels'?"),
    ({"powr": 1}, "unknown config field 'powr': did you mean 'engine.power'?"),
    ({"zzz": 1}, "unknown config field 'zzz': have: name, wheels, engine"),
    ({"wheels": "4"}, "wheels='4' must be of type int"),
    ({"wheels": None}, "wheels=None must be of type int"),
    ({"wheels": True}, "wheels=True must be of type int"),
    ({"name": 1}, "name=1 must be of type str"),
    ({"engine": {"is_loud": 1}}, "engine.is_loud=1 must be of type bool"),
    ({"engine": {"cylinders": 1.5}}, "engine.cylinders=1.5 must be of type"),
    ({"engine": 3}, "engine=3 must be a section of fields"),
    ({"wheels": 2}, "wheels=2 are too few"),
  ],
)
def test_a_wrong_field_or_value_is_refused_in_one_line(values, message):
  with pytest.raises(ValueError, match=re.escape(message)) as caught:
    dataclass_from(Car, values)
  assert "\n" not in str(caught.value)


def test_changes_name_the_field_and_both_values():
  old = {"a": 1, "b": {"c": 2.5, "d": "x"}, "gone": 3, "x": {"y": 1}}
  new = {"a": 1, "b": {"c": 3.5, "d": None}, "come": {"e": 4}, "x": {"y": 2}}
  changes = [
    "b.c: 2.5 -> 3.5",
    "b.d: 'x' -> None",
    "come.e: None -> 4",
    "gone: 3 -> None",
  ]
  assert changed_fields(old, new) == [*changes, "x.y: 1 -> 2"]
  # A name that begins like a free one is another name.
  assert changed_fields(old, new, ["b", "x.y", "com"]) == changes[2:]
  nested = {"b": {"x": 1, "c": {"y": None}}, "a.z": 2, "empty": {}}
  expected = [("b.x", 1), ("b.c.y", None), ("a.z", 2), ("empty", {})]
  assert list(flat(nested).items()) == expected


def test_flat_values_are_nested_again():
  nested = {"b": {"x": 1, "c": {"y": None}}, "empty": {}}
  assert unflat(flat(nested)) == nested
  assert unflat({"a/b": 1, "a/c/d": 2}, "/") == {"a": {"b": 1, "c": {"d": 2}}}


def test_leaves_have_names_and_one_that_is_not_finite_is_found():
  found = leaves_by_path({"b": {"w": jnp.ones(2)}, "a": jnp.zeros(3)})
  assert {name: leaf.size for name, leaf in found.items()} == {"a": 3, "b/w": 2}
  good = {"count": jnp.int32(3), "w": jnp.ones(4)}
  assert bool(all_finite(good))
  for bad in (jnp.nan, jnp.inf, -jnp.inf):
    assert not bool(all_finite({**good, "w": jnp.ones(4).at[2].set(bad)}))


def test_a_link_is_not_followed_and_a_directory_may_be_one(tmp_path):
  precious = tmp_path / "precious"
  ours = tmp_path / "ours"
  precious.write_text("kept")
  ours.mkdir()
  for name in ("file", f".file.{os.getpid()}.partial"):
    (ours / name).symlink_to(precious)
  with pytest.raises(OSError) as found:
    files.opened_to_append(ours / "file")
  assert found.value.strerror == "it is a symbolic link"
  (tmp_path / "link").symlink_to(ours)
  with files.replaced(tmp_path / "link" / "file") as file:
    file.write(b"a")
  with files.opened_to_append(tmp_path / "link" / "file") as file:
    file.write(b"b")
  assert precious.read_text() == "kept"
  assert [each.name for each in ours.iterdir()] == ["file"]
  assert (ours / "file").read_text() == "ab"
  assert not (ours / "file").is_symlink()
