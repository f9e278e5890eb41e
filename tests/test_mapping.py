import dataclasses
import re

import pytest

from dilocox_jax.checks import changed_fields, check_path, dataclass_from, flat


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


def refusal(values):
  """The one line that a mapping is refused with."""
  with pytest.raises(ValueError) as caught:
    dataclass_from(Car, values)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def test_what_is_set_is_set_and_the_rest_is_default():
  assert dataclass_from(Car, {}) == Car()
  built = dataclass_from(Car, {"wheels": 3, "engine": {"cylinders": 6}})
  assert built == Car(wheels=3, engine=Engine(cylinders=6))


def test_a_built_value_comes_back_from_its_own_mapping():
  car = Car("large", 6, Engine(2.5, 8, None, True))
  assert dataclass_from(Car, dataclasses.asdict(car)) == car


@pytest.mark.parametrize(
  ("values", "path", "nearest"),
  [
    ({"wheel": 3}, "wheel", "wheels"),
    ({"engine": {"cilinders": 3}}, "engine.cilinders", "cylinders"),
    ({"engin": {}}, "engin", "engine"),
  ],
)
def test_an_unknown_field_is_answered_with_the_nearest(values, path, nearest):
  assert refusal(values) == (
    f"unknown config field {path!r}: did you mean {nearest!r}?"
  )


def test_a_field_like_no_other_is_answered_with_all_there_are():
  assert refusal({"zzz": 1}) == (
    "unknown config field 'zzz': have: name, wheels, engine"
  )


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"wheels": "4"}, "wheels='4' must be of type int"),
    ({"wheels": 4.0}, "wheels=4.0 must be of type int"),
    ({"wheels": None}, "wheels=None must be of type int"),
    ({"wheels": True}, "wheels=True must be of type int"),
    ({"name": 1}, "name=1 must be of type str"),
    ({"engine": {"is_loud": 1}}, "engine.is_loud=1 must be of type bool"),
    ({"engine": {"power": "1"}}, "engine.power='1' must be of type float"),
    ({"engine": {"power": True}}, "engine.power=True must be of type float"),
    ({"engine": {"cylinders": 1.5}}, "engine.cylinders=1.5 must be of type"),
    ({"engine": 3}, "engine=3 must be a section of fields"),
  ],
)
def test_a_value_of_a_wrong_type_is_refused_with_its_path(values, message):
  assert message in refusal(values)


@pytest.mark.parametrize("name", ["power", "share"])
def test_ints_serve_as_floats(name):
  value = getattr(dataclass_from(Car, {"engine": {name: 2}}).engine, name)
  assert type(value) is float
  assert value == 2


def test_none_unsets_a_field_that_may_be_unset():
  assert dataclass_from(Engine, {"cylinders": None, "share": None}) == Engine()


def test_checks_of_the_value_itself_run_too():
  assert refusal({"wheels": 2}) == "wheels=2 are too few"


def test_a_path_to_a_field_or_a_section_exists():
  for path in "name", "engine", "engine.power":
    check_path(Car, path)


@pytest.mark.parametrize(
  ("path", "message"),
  [
    ("nam", "unknown config field 'nam': did you mean 'name'?"),
    ("engine.powr", "'engine.powr': did you mean 'power'?"),
    ("motor.power", "'motor.power': have: name, wheels, engine"),
    ("wheels.number", "unknown config field 'wheels.number'"),
    ("engine.share.of", "unknown config field 'engine.share.of'"),
  ],
)
def test_a_path_that_leads_nowhere_is_refused(path, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    check_path(Car, path)


def test_equal_mappings_have_no_changes():
  car = dataclasses.asdict(Car())
  assert changed_fields(car, dataclasses.asdict(Car())) == []


def test_changes_name_the_field_and_both_values():
  old = {"a": 1, "b": {"c": 2.5, "d": "x"}, "gone": 3}
  new = {"a": 1, "b": {"c": 3.5, "d": None}, "come": {"e": 4}}
  assert changed_fields(old, new) == [
    "b.c: 2.5 -> 3.5",
    "b.d: 'x' -> None",
    "come.e: None -> 4",
    "gone: 3 -> None",
  ]


def test_free_fields_and_sections_may_change():
  old = {"total": 1, "eval": {"a": 1, "b": 2}, "evaluate": 1, "x": {"y": 1}}
  new = {"total": 2, "eval": {"a": 3, "b": 4}, "evaluate": 2, "x": {"y": 2}}
  # A name that begins like a free one is another name.
  assert changed_fields(old, new, ["eval", "x.y"]) == [
    "evaluate: 1 -> 2",
    "total: 1 -> 2",
  ]


def test_nested_values_have_dotted_names_in_their_order():
  nested = {"b": {"x": 1, "c": {"y": None}}, "a.z": 2, "empty": {}}
  assert list(flat(nested).items()) == [("b.x", 1), ("b.c.y", None), ("a.z", 2)]
