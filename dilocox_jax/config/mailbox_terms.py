"""What replicas of a run must have in common when they meet in a store.

`dilocox_jax.Mailbox` compares these terms, field by field. They follow from the
config that a run saves in its work directory. So a program without JAX can read
that file and take part.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from dilocox_jax.checks import flat, require
from dilocox_jax.config.run import may_differ
from dilocox_jax.config.sections import SyncConfig
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.plan.schedule.methods import Method

# Field of the config by attribute of `MailboxRules`.
_FIELD_OF_RULE = {
  "replicas": "mesh.num_replicas",
  "quorum": "mailbox.quorum",
  "grace_s": "mailbox.grace_s",
  "snapshot_every": "mailbox.snapshot_every",
  "store_bytes": "mailbox.store_bytes",
  "max_norm_ratio": "exchange.max_norm_ratio",
  "full_weight_ratio": "mailbox.full_weight_ratio",
  "shares": "mailbox.shares",
}


@dataclasses.dataclass(frozen=True)
class MailboxTerms:
  """The terms of a run.

  Attributes:
    fields: All fields of the run's config, by dotted name.
    config: The settings that must be equal in all replicas, by dotted name; the
      argument `config` of `dilocox_jax.Mailbox`.
    rules: The rules of the exchange; the argument `rules`.
    method: Schedule and rule of the run's method.
  """

  fields: dict[str, Any]
  config: dict[str, Any]
  rules: MailboxRules
  method: Method

  def check_computed(self, computed: Mapping[str, Collection[Any]]) -> None:
    """Refuses a run that a program of its own does not compute.

    Args:
      computed: The values of fields that the program computes, by dotted name.

    Raises:
      ValueError: One line that names the first field with another value.
    """
    for field, values in computed.items():
      require(
        self.fields.get(field) in values,
        f"config.{field} is {self.fields.get(field)!r} in this run, and this"
        f" program computes only {' or '.join(map(repr, values))}",
      )


def mailbox_terms(
  values: Mapping[str, Any], override_names: Collection[str] = ()
) -> MailboxTerms:
  """Returns the terms of a run that `experiments.train --mailbox` trains.

  Args:
    values: All fields of the run's config, with its sections, as in the file
      `config.json` of its work directory.
    override_names: Names of the parts that the caller of `dilocox_jax.train`
      passes, such as "model".

  Raises:
    ValueError: If a field is missing, or a rule is wrong. The message is one
      line.
  """
  fields = flat(values)
  missing = [
    field
    for field in ("sync.method", *_FIELD_OF_RULE.values())
    if field not in fields
  ]
  require(
    not missing,
    f"the config lacks {', '.join(missing)}: take the config.json of a run",
  )
  config: dict[str, Any] = {"overrides": sorted(override_names)}
  fields_that_may_differ = may_differ()
  for field, value in fields.items():
    if field not in fields_that_may_differ:
      config[field] = value
  sync = {
    field.removeprefix("sync."): value
    for field, value in fields.items()
    if field.startswith("sync.")
  }
  return MailboxTerms(
    fields=fields,
    config=config,
    rules=mailbox_rules(fields),
    method=SyncConfig(**sync).named,
  )


def mailbox_rules(fields: Mapping[str, Any]) -> MailboxRules:
  """Returns the rules of the exchange of a run.

  Args:
    fields: All fields of the run's config, by dotted name.

  Raises:
    ValueError: If a rule is wrong. The message is one line.
  """
  rules = {rule: fields[field] for rule, field in _FIELD_OF_RULE.items()}
  if not rules["max_norm_ratio"]:
    del rules["max_norm_ratio"]  # The default of the rules.
  return MailboxRules(**rules)
