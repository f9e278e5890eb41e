"""Fields of a config that a run would ignore.

A field that is set and then ignored misleads: someone who sets `data.glob` and
forgets `data.source` would train on another text without a warning. So every
field that only some runs read stands here, with its condition.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from dilocox_jax.codecs.named import split_links
from dilocox_jax.config.sections import InnerConfig
from dilocox_jax.data import sources
from dilocox_jax.plan.choices import OPTIMIZER_OPTIONS
from dilocox_jax.plan.collective import MAILBOX
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.schedule.methods import METHODS

Values = Mapping[str, Any]  # All fields of a run by their dotted names.
_OPTIONS = ("b1", "b2", "weight_decay", "momentum", "nesterov")
Ignored = tuple[str, tuple[str, ...], str]  # A section, its fields, a remedy.


def unread_fields(values: Values, defaults: Values) -> dict[str, str]:
  """Finds fields that are not at their default and that the run ignores.

  Args:
    values: All fields of a run by their dotted names, with values for those
      that a method may set.
    defaults: Default values by dotted names; only these fields are looked at.

  Returns:
    A message for each such field, by its dotted name.
  """
  return {
    path: f"{path}={values[path]!r} would be ignored, as {remedy}"
    for section, names, remedy in _ignored(values)
    for name in names
    if (path := f"{section}.{name}") in defaults
    and values[path] != defaults[path]
  }


def changed_options(inner: InnerConfig) -> tuple[str, ...]:
  """Returns the options of the inner optimizer that are not at their default.

  Args:
    inner: The section `inner` of a run's config.
  """
  defaults = dataclasses.asdict(InnerConfig())
  return tuple(
    name
    for name in _OPTIONS
    if name in defaults and getattr(inner, name) != defaults[name]
  )


def _ignored(values: Values) -> Iterator[Ignored]:
  """Yields a section, fields of it that a run ignores, and what to do."""
  yield from _ignored_data(values)
  if _model_value(values, "positions") == "learned":
    remedy = "model.positions=learned rotates nothing: take rope"
    yield "model", ("rope_base",), remedy
  yield from _ignored_options("inner", values["inner.optimizer"])
  yield from _ignored_options("outer", values["outer.optimizer"])
  if values["inner.schedule"] == "constant":
    remedy = "inner.schedule=constant never decays: take cosine or wsd"
    yield "inner", ("final_fraction",), remedy
  method = values["sync.method"]
  if method in METHODS and METHODS[method]().exchanged == "gradient":
    remedy = (
      f"sync.method={method} averages gradients and has no outer optimizer: "
      "drop it"
    )
    names = ("optimizer", "learning_rate", "momentum", "nesterov")
    yield "outer", names, remedy
  codec = values["exchange.codec"]
  if codec == "float32":
    remedy = (
      "exchange.codec=float32 loses nothing that could be made up for: name "
      "another codec or drop it"
    )
    yield "exchange", ("feedback", "keep_unsent"), remedy
  if not values["exchange.feedback"]:
    remedy = "there is no residual without feedback: set exchange.feedback=1"
    yield "exchange", ("against",), remedy
  if values["exchange.collective"] != MAILBOX:
    names = ("quorum", "grace_s", "snapshot_every", "max_norm_ratio")
    remedy = "replicas of one runtime have no store: let them meet by --meet"
    yield "meet", names, remedy
  if "low_rank" not in dict(split_links(codec)):
    remedy = f"exchange.codec={codec} has no rank to follow: take low_rank+int"
    yield "adaptive", ("mode", "energy"), remedy
  if values["adaptive.mode"] == "off":
    remedy = "adaptive.mode=off changes no rank: take rank or rank_and_interval"
    yield "adaptive", ("window_rounds",), remedy
  if values["mesh.num_stages"] * values["mesh.num_data_shards"] <= 1:
    names = ("pipeline", "remat")
    remedy = "a replica on one device has no pipeline: set mesh.num_stages"
    yield "mesh", names, remedy
  else:
    remedy = "a replica on several devices has its own: set mesh.remat"
    yield "model", ("remat",), remedy
  if values["mesh.num_stages"] <= 1:
    remedy = "one stage sends nothing to another: set mesh.num_stages"
    yield "mesh", ("boundary",), remedy


def _model_value(values: Values, name: str) -> Any:
  """Returns a field of the model, which may be that of the preset."""
  given = values[f"model.{name}"]
  preset = MODEL_PRESETS[values["model.preset"]]
  return getattr(preset, name) if given is None else given


def _ignored_data(values: Values) -> Iterator[Ignored]:
  source = values["data.source"]
  for names, remedy in (
    (("glob", "mix"), "reads no files: set data.source=text_files"),
    (("text_field",), "reads no JSON: set data.source=text_files"),
    (("validation_fraction",), "is divided already: drop it"),
    (("judge_fraction",), "has no documents to divide: drop it"),
    (
      ("tokenizer", "vocab_size", "end_of_text"),
      "has tokens already: drop it",
    ),
  ):
    if not sources.reads(source, names[0]):
      yield "data", names, f"data.source={source} {remedy}"
  if values["data.tokenizer"] != "bpe":
    remedy = "only data.tokenizer=bpe is trained: set it, or drop this"
    yield "data", ("vocab_size",), remedy
  if values["data.tokenizer"] in ("bytes", "bpe"):
    remedy = "bytes and bpe have their own: set data.tokenizer to a file"
    yield "data", ("end_of_text",), remedy


def _ignored_options(section: str, optimizer: str) -> Iterator[Ignored]:
  # An optimizer that is not in the table may have any of them.
  has = OPTIMIZER_OPTIONS.get(optimizer, _OPTIONS)
  for option in _OPTIONS:
    if option not in has:
      remedy = f"{section}.optimizer={optimizer} has no {option}: drop it"
      yield section, (option,), remedy
