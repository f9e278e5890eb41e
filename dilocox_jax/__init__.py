"""Low-communication training: DiLoCo and its relatives in JAX.

  import dilocox_jax as dx

  tx = dx.diloco(optax.adamw(3e-4), optax.sgd(0.7, momentum=0.9, nesterov=True))

Names are loaded when they are first used, so importing this package loads
neither JAX nor numpy. `dir(dilocox_jax)` lists all names: the functions below
and one function for every method of `plan.schedule.methods.METHODS`, which
makes an optax transform of that method.
"""

import importlib
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
  "Event": "plan.schedule.sync_schedule",
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
  "register_method": "plan.schedule.methods",
  "register_model": "plan.model.presets",
  "register_optimizer": "optimizers",
  "register_recipe": "config.recipes",
  "register_rule": "plan.schedule.methods",
  "register_source": "data.sources",
  "step_transform": "api.step_methods",
  "train": "api.runs",
}
_METHODS = "plan.schedule.methods"


def __getattr__(name: str) -> Any:
  if name in _HOMES:
    return getattr(_module(_HOMES[name]), name)
  if not name.startswith("_") and name in _module(_METHODS).METHODS:
    return _module("api.step_methods").named_step_transform(name)
  raise AttributeError(
    f"dilocox_jax has no {name!r}; it has: {', '.join(__dir__())}"
  )


def __dir__() -> list[str]:
  return sorted([*_HOMES, *_module(_METHODS).METHODS])


def _module(path: str) -> Any:
  return importlib.import_module(f"dilocox_jax.{path}")
