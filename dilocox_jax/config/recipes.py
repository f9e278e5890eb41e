"""Recipes: the config fields that a method sets in addition to its schedule.

A recipe has values for some of these: inner optimizer, codec, error feedback,
adaptive mode, outer optimizer. For example, with `sync.method=muloco` the inner
optimizer is Muon, and messages have 2 bits for each value. A value that the
user sets wins over the recipe, even if it equals the default.
"""

import math
from collections.abc import Mapping
from typing import Any

from dilocox_jax.checks import known
from dilocox_jax.config.sections import DEVICES
from dilocox_jax.field_facts import Facts
from dilocox_jax.plan.choices import Registry
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.schedule.fragments import SLICED
from dilocox_jax.plan.schedule.methods import METHODS, method_parts, takes

Values = Mapping[str, Any]  # All fields of a run by their dotted names.

# All fields that a recipe may set, with the values that they have if the
# method's recipe does not set them.
DEFAULTS: Mapping[str, Any] = {
  "inner.optimizer": "adamw",
  "exchange.codec": "float32",
  "exchange.feedback": 0.0,
  "adaptive.mode": "off",
  "outer.learning_rate": 0.7,
  "outer.momentum": 0.6,  # Measured better than the papers' 0.9.
  "outer.average_power": 0.0,
}

# Methods that are not in this table have the values of `DEFAULTS`.
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
  # Wang et al., 2023, ICML: a random mask, the top-k of its values, 4 bits.
  "cocktail_sgd": {
    "exchange.codec": "random_mask(fraction=0.1)"
    "+top_k(fraction=0.2,indices=bitmap)+int(bits=4)",
    "exchange.feedback": 1.0,
  },
  # arXiv 2407.07852: pseudo-gradients travel in fp16; outer Nesterov at 0.9.
  "open_diloco": {
    "exchange.codec": "float16",
    "outer.learning_rate": 0.7,
    "outer.momentum": 0.9,
  },
  # arXiv 2508.15706: 64 of 4096 values in 2 bits; the outer step is plain SGD.
  "sparse_loco": {
    "exchange.codec": "top_k(fraction=0.015625,block_size=4096)"
    "+int(bits=2,scale=tensor)",
    "exchange.feedback": 0.95,
    "outer.learning_rate": 1.0,
    "outer.momentum": 0.0,
  },
  # arXiv 2505.23725: Muon as inner optimizer; messages of 2 bits a value.
  "muloco": {
    "inner.optimizer": "muon",
    "exchange.codec": "int(bits=2)",
    "exchange.feedback": 0.95,
  },
  # arXiv 2501.18512: only sign and exponent, 4 bits a value.
  "streaming_diloco": {"exchange.codec": "e3m0"},
  # arXiv 2506.21263: low-rank factors in 4 bits; rank and H follow the rank of
  # the averaged update (Algorithm 3).
  "dilocox": {
    "exchange.codec": "low_rank(rank=16)+int(bits=4)",
    "exchange.feedback": 1.0,
    "adaptive.mode": "rank_and_interval",
  },
  # Ours: the settings with the lowest loss in our sweeps (docs/results.md).
  "overlap_loco": {
    "inner.optimizer": "muon",
    "exchange.codec": "int(bits=1)",
    "exchange.feedback": 1.0,
    "outer.learning_rate": 1.0,
    "outer.momentum": 0.0,
  },
}

RECIPES: Registry[Mapping[str, Any]] = Registry("recipe")


def register_recipe(method: str, values: Mapping[str, Any]) -> None:
  """Registers the config fields that a method sets besides its schedule.

  Args:
    method: Name of a registered method.
    values: Values of config fields, by dotted name, e.g. {"exchange.codec":
      "float16"}. A value that the user sets wins over them.

  Raises:
    ValueError: If there is no such method, if the method has a recipe already,
      or if a recipe may not set one of the fields.
  """
  known("method", method, METHODS)
  for path in values:
    known(f"field of recipe {method!r}", path, DEFAULTS)
  RECIPES.add(method, values)


for _method, _values in _PUBLISHED.items():
  register_recipe(_method, _values)

# If the config does not say how many: largest number of warm-up steps.
_MOST_WARMUP_STEPS = 50
# If the config does not say how many: largest number of steps between two
# evaluations or two checkpoints, and of a segment without rounds.
_LONGEST_INTERVAL = 150
_LONGEST_SEGMENT = 50
# A short run has this many evaluations and checkpoints. A loss curve needs some
# points, and a run that is killed should not begin again from its start. There
# are fewer checkpoints, because each one writes the whole state.
_NUM_EVALUATIONS = 10
_NUM_CHECKPOINTS = 4


def resolved(
  settings: Mapping[str, Any], facts: Mapping[str, Facts]
) -> dict[str, Any]:
  """Replaces None in fields that the recipe or the number of steps decides.

  A value of the recipe that the run would not read is replaced by the default.
  Example: with `exchange.codec=int` there is no low rank to adapt, so DiLoCoX
  gets `adaptive.mode="off"`.

  Args:
    settings: All fields of a run by dotted name. None: not set by the user.
    facts: What each field declares, e.g. when a run reads it, by dotted name.

  Returns:
    All fields by dotted name, without None in the fields of `DEFAULTS` and in
    those that follow from `total_steps`, such as the warm-up. If adapters are
    trained and the method has fragments, `sync.fragment_order` is set, too.
  """
  name, _ = method_parts(settings["sync.method"])
  recipe = {
    path: value
    for path, value in RECIPES.get(name, {}).items()
    if settings[path] is None
  }
  total_steps = max(settings["total_steps"], 0)
  defaults: dict[str, Any] = {
    **DEFAULTS,
    # The warm-up has 10 steps of a run of 40, and 50 of a run of 200 or more.
    "inner.warmup_steps": min(_MOST_WARMUP_STEPS, total_steps // 4),
    "evaluation.interval_steps": min(
      _LONGEST_INTERVAL, _interval(total_steps, _NUM_EVALUATIONS)
    ),
    "checkpoint.interval_steps": min(
      _LONGEST_INTERVAL, _interval(total_steps, _NUM_CHECKPOINTS)
    ),
    # A run is evaluated and saved between two segments only.
    "sync.steps_per_dispatch": min(
      _LONGEST_SEGMENT, _interval(total_steps, _NUM_EVALUATIONS)
    ),
  }
  if settings["lora.rank"] and takes(settings["sync.method"], "fragment_order"):
    # Only layers have adapters, so all fragments can be equal slices.
    defaults["sync.fragment_order"] = SLICED[0]
  values = dict(settings)
  for path, value in defaults.items():
    if values[path] is None:
      values[path] = value
  values |= recipe
  # Fields of the recipe that the run would not read are set to their defaults.
  # After that the run may not read another field of the recipe any more. So
  # this is repeated until the run reads all that are left.
  while True:
    unread = unread_fields(values, DEFAULTS, facts)
    unread_of_recipe = recipe.keys() & unread.keys()
    if not unread_of_recipe:
      return values
    for path in unread_of_recipe:
      values[path] = DEFAULTS.get(path)
      del recipe[path]


def _interval(total_steps: int, num_parts: int) -> int:
  """Returns `total_steps` / `num_parts`, rounded up, but at least 1."""
  return max(1, math.ceil(total_steps / num_parts))


def unread_fields(
  values: Values, defaults: Values, facts: Mapping[str, Facts]
) -> dict[str, str]:
  """Finds fields that differ from their defaults and that a run would ignore.

  Args:
    values: All fields of a run by dotted name, without None in the fields that
      recipes may set.
    defaults: Defaults of the fields to check, by dotted name.
    facts: What each field declares, e.g. when a run reads it, by dotted name.

  Returns:
    An error message for each such field, by its dotted name.
  """
  # Whether a run reads a field may also depend on the number of devices of a
  # replica, and on positions that the preset of the model chooses.
  preset = MODEL_PRESETS[values["model.preset"]]
  deciding_values = {
    **values,
    DEVICES: values["mesh.num_stages"]
    * values["mesh.num_data_shards"]
    * values["mesh.num_tensor_shards"],
    "model.positions": values["model.positions"] or preset.positions,
  }
  messages = {}
  for path, default in defaults.items():
    read_if = facts[path].read_if
    if read_if is None or values[path] == default:
      continue
    deciding_value = deciding_values[read_if.field]
    if not read_if.holds(deciding_value):
      messages[path] = (
        f"{path}={values[path]!r} would be ignored, as {read_if.field}="
        f"{deciding_value!r} does not read it: change one of them"
      )
  return messages
