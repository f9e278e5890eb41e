"""Low-communication training: DiLoCo and its relatives in JAX.

  import dilocox_jax as dx

  tx = dx.diloco(optax.adamw(3e-4), optax.sgd(0.7, momentum=0.9, nesterov=True))

Each method, such as DiLoCo, has a function of its name that builds an optax
transform. `dir(dilocox_jax)` lists all names.

A name is imported when it is first used, so the import of this package loads
neither JAX nor numpy. Type checkers read the names from `__init__.pyi`, which
`make stubs` writes.
"""

import importlib
from collections.abc import Iterable
from typing import Any

# Name -> module that defines it.
_HOMES = {
  "Aggregator": "aggregator",
  "ApplyRule": "outer.rules",
  "Averaged": "aggregator",
  "BusyError": "metrics.work_directory",
  "Codec": "codecs.base",
  "Collective": "aggregators.collective",
  "Corpus": "data.corpus",
  "Division": "plan.model.division",
  "Encoder": "codecs.base",
  "Estimate": "gap.law",
  "Event": "plan.schedule.sync_schedule",
  "ExpectedGap": "gap.expected",
  "FinishedRound": "training.watching",
  "LogStart": "metrics.run_logs",
  "Lora": "plan.model.adapters",
  "LossModel": "models.loss",
  "ReplicaStaleError": "mailbox_protocol.agreement",
  "Mailbox": "mailbox_protocol.mailbox",
  "MailboxRules": "mailbox_protocol.roster",
  "MailboxAddress": "training.mailbox_replica",
  "Method": "plan.schedule.methods",
  "Model": "models.transformer",
  "ModelShape": "plan.model.shapes",
  "Operation": "plan.operations",
  "Projection": "codecs.base",
  "Quantizer": "codecs.base",
  "RecordError": "metrics.lines",
  "Reduced": "codecs.base",
  "RefusedError": "metrics.work_directory",
  "RuleKind": "plan.schedule.methods",
  "RunConfig": "config",
  "RunLog": "metrics.run_logs",
  "Sender": "aggregators.collective",
  "StoppedError": "mailbox_protocol.agreement",
  "SyncSchedule": "plan.schedule.sync_schedule",
  "TrainingStoppedError": "training.states",
  "averaged": "outer.average",
  "compare_methods": "api.method_plans",
  "divide_model": "distributed.partition_rules",
  "encoded_bytes": "aggregators.sizes",
  "estimate": "api.runs",
  "exchange": "aggregators.exchange",
  "expected_gap": "gap.expected",
  "growing_plans": "api.growing_plans",
  "join_rounds": "rounds.late_joiner",
  "limited": "checks",
  "load": "api.runs",
  "mailbox": "rounds.exchanges",
  "mailbox_terms": "config.mailbox_terms",
  "make_rounds": "api.rounds",
  "named_codec": "codecs.named",
  "norm_filter": "aggregators.norm_filter",
  "operation": "plan.operations",
  "outer_params": "outer.step_state",
  "register_codec": "codecs.named",
  "register_collective": "aggregators.collective",
  "register_log": "metrics.run_logs",
  "register_method": "plan.schedule.methods",
  "register_model": "plan.model.presets",
  "register_optimizer": "optimizers",
  "register_recipe": "config.recipes",
  "register_rule": "plan.schedule.methods",
  "register_source": "data.sources",
  "schedule_free": "outer.average",
  "step_transform": "api.step_methods",
  "train": "api.runs",
}
# The methods of this package. `__all__` must name them without loading the
# module of methods, which loads numpy.
_METHOD_NAMES = (
  "allreduce",
  "cocktail_sgd",
  "delayed",
  "diloco",
  "dilocox",
  "eager",
  "muloco",
  "open_diloco",
  "overlap_loco",
  "sparse_loco",
  "streaming_diloco",
)
_METHODS = "plan.schedule.methods"
# Packages that are not installed with the core, and the extra of setup.py that
# installs each.
_EXTRA_OF_PACKAGE = {
  "flax": "train",
  "grain": "train",
  "markdown_it": "train",
  "matplotlib": "train",
  "orbax": "train",
  "rich": "train",
}

__version__ = "0.1.0"
__all__ = [*_HOMES, *_METHOD_NAMES]  # pyright: ignore - the stub lists them


def __getattr__(name: str) -> Any:
  if name in _HOMES:
    return getattr(_module(_HOMES[name], needed_by=name), name)
  if not name.startswith("_") and name in _methods():
    step_methods = _module("api.step_methods", needed_by=name)
    return step_methods.named_step_transform(name)
  raise AttributeError(
    f"dilocox_jax has no {name!r}; it has: {', '.join(__dir__())}"
  )


def __dir__() -> list[str]:
  return sorted({*__all__, *_methods(), "__version__"})


def _methods() -> Iterable[str]:
  """Returns the names of all methods, registered ones included."""
  return _module(_METHODS, needed_by="method").METHODS


def _module(path: str, needed_by: str) -> Any:
  """Imports a module of this package by its path, e.g. "api.runs".

  If a package that an extra installs is missing, ImportError names the extra,
  and the public name that was used (`needed_by`).
  """
  try:
    return importlib.import_module(f"dilocox_jax.{path}")
  except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0]
    if package not in _EXTRA_OF_PACKAGE:
      raise
    raise ImportError(
      f"dilocox_jax.{needed_by} needs the package {package}: "
      f"pip install 'dilocox_jax[{_EXTRA_OF_PACKAGE[package]}]'"
    ) from None
