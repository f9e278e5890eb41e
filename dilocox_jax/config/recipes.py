"""What a named method consists of beside its schedule, as plain data.

A paper's method is a schedule (`plan.schedule.methods`) together with an inner
optimizer, a codec, error feedback and an outer optimizer. The schedule follows
from the method's name alone. The rest stands here, once for each method, so
that `sync.method=muloco` is MuLoCo wherever it is written.

A config field that was set explicitly always wins over the recipe, also where
it was set to the value that other methods have.
"""

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

# The value of every field that a recipe may set, for methods that leave it.
DEFAULTS: Mapping[str, Any] = {
  "inner.optimizer": "adamw",
  "exchange.codec": "float32",
  "exchange.feedback": 0.0,
  "adaptive.mode": "off",
  "outer.learning_rate": 0.7,
  "outer.momentum": 0.6,  # Measured better than the papers' 0.9.
  "outer.average_power": 0.0,
}

# Methods that are not listed here are their schedule and `DEFAULTS`.
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
  # Wang et al., 2023, ICML: a random mask, top-k of its values, 4 bits.
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
  # arXiv 2505.23725: Muon inside, 2 bits a value between replicas.
  "muloco": {
    "inner.optimizer": "muon",
    "exchange.codec": "int(bits=2)",
    "exchange.feedback": 0.95,
  },
  # arXiv 2501.18512: sign and exponent alone, 4 bits a value.
  "streaming_diloco": {"exchange.codec": "e3m0"},
  # arXiv 2506.21263: low-rank factors in 4 bits; rank and H follow the rank of
  # the averaged update (Algorithm 3).
  "dilocox": {
    "exchange.codec": "low_rank(rank=16)+int(bits=4)",
    "exchange.feedback": 1.0,
    "adaptive.mode": "rank_and_interval",
  },
  # Ours: what ended lowest in our sweeps (docs/results.md).
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
  """Says which fields a method sets beside its schedule.

  Args:
    method: Name of the method.
    values: Values by the dotted names of their fields.

  Raises:
    ValueError: If the method has a recipe or there is no such method, or if a
      field is not left to methods.
  """
  known("method", method, METHODS)
  for path in values:
    known(f"field of recipe {method!r}", path, DEFAULTS)
  RECIPES.add(method, values)


for _method, _values in _PUBLISHED.items():
  register_recipe(_method, _values)

_MOST_WARMUP_STEPS = 50


def resolved(
  given: Mapping[str, Any], facts: Mapping[str, Facts]
) -> dict[str, Any]:
  """Fills in what a config leaves to its method.

  What a recipe sets is left out where nothing reads it: DiLoCoX with
  `exchange.codec=int` has no rank to adapt, and with float32 it loses nothing
  that could be fed back.

  Args:
    given: All fields of a run by their dotted names; None where nothing was
      set.
    facts: What is true of each field, by its dotted name.

  Returns:
    The same fields with values for those of `DEFAULTS` and the warm-up.
  """
  name, _ = method_parts(given["sync.method"])
  recipe = dict(RECIPES.get(name, {}))
  recipe = {k: v for k, v in recipe.items() if given[k] is None}
  # With total_steps = 40 the warm-up has 10 steps, with 200 or more it has 50.
  warmup_steps = min(_MOST_WARMUP_STEPS, max(given["total_steps"], 0) // 4)
  defaults: dict[str, Any] = {**DEFAULTS, "inner.warmup_steps": warmup_steps}
  if given["lora.rank"] and takes(given["sync.method"], "fragment_order"):
    # Adapters are in layers alone, so all of them are cut alike.
    defaults["sync.fragment_order"] = SLICED[0]
  unset = {k: v for k, v in defaults.items() if given[k] is None}
  values = {**given, **unset, **recipe}
  # A field that is left out may be what another one needs, so this is repeated.
  while True:
    left_out = recipe.keys() & unread_fields(values, DEFAULTS, facts).keys()
    if not left_out:
      return values
    for path in left_out:
      values[path] = DEFAULTS.get(path)
      del recipe[path]


def unread_fields(
  values: Values, defaults: Values, facts: Mapping[str, Facts]
) -> dict[str, str]:
  """Finds fields that are not at their default and that the run ignores.

  Args:
    values: All fields of a run by their dotted names, with values for those
      that a method may set.
    defaults: Default values by dotted names; only these fields are looked at.
    facts: What is true of each field, by its dotted name.

  Returns:
    A message for each such field, by its dotted name.
  """
  preset = MODEL_PRESETS[values["model.preset"]]
  deciding = {
    **values,
    DEVICES: values["mesh.num_stages"] * values["mesh.num_data_shards"],
    "model.positions": values["model.positions"] or preset.positions,
  }
  messages = {}
  for path, default in defaults.items():
    read_if = facts[path].read_if
    if read_if is None or values[path] == default:
      continue
    decided = deciding[read_if.field]
    if not read_if.holds(decided):
      messages[path] = (
        f"{path}={values[path]!r} would be ignored, as {read_if.field}="
        f"{decided!r} does not read it: change one of them"
      )
  return messages
