"""Computes what replicas must have in common to exchange through a mailbox.

A mailbox is a folder or bucket through which replicas that are separate
programs exchange. What they must have in common, the *terms*, follows from the
file `config.json` in the work directory of a run. No JAX is needed to compute
the terms.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from dilocox_jax.checks import flat, require
from dilocox_jax.config.run import may_differ
from dilocox_jax.config.sections import SyncConfig
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.plan.schedule.methods import Method

# For each attribute of `MailboxRules`, the field of a config.
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
  """What replicas must have in common to exchange through a folder or bucket.

  Attributes:
    fields: All fields of the run's config, by dotted name. Some of them may
      differ between replicas.
    config: The settings that must be equal in all replicas, by dotted name. The
      entry "overrides" lists the parts that the user has replaced, e.g.
      "model". This is the argument `config` of `dilocox_jax.Mailbox`.
    rules: Rules of the exchange, such as how long to wait for a replica. They
      are the argument `rules` of `dilocox_jax.Mailbox`.
    method: The method: when the replicas exchange, and how they go on with a
      mean.
  """

  fields: dict[str, Any]
  config: dict[str, Any]
  rules: MailboxRules
  method: Method

  def check_computed(self, computed: Mapping[str, Collection[Any]]) -> None:
    """Checks that a program that supports only some settings can take part.

    Args:
      computed: For each field that the program (e.g. a replica in PyTorch)
        reads, by dotted name, the values that it supports.

    Raises:
      ValueError: One line, if the program does not support the run's value of
        such a field.
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
  """Returns what a replica must have in common with a run to take part in it.

  Args:
    values: All fields of the run's config, nested by section, as in the file
      `config.json` of its work directory.
    override_names: Names of the arguments of `dilocox_jax.train` with which the
      user has replaced parts of the config, such as "model".

  Raises:
    ValueError: One line, if `sync.method` or a field about which all replicas
      must agree (e.g. `mailbox.quorum`) is missing or has a wrong value.
    TypeError: If the section `sync` has an unknown field.
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
  """Returns the rules by which the replicas of a run exchange messages.

  `fields` has all fields of the config by dotted name. Raises ValueError if a
  rule is wrong.
  """
  rules = {rule: fields[field] for rule, field in _FIELD_OF_RULE.items()}
  if not rules["max_norm_ratio"]:
    del rules["max_norm_ratio"]  # `MailboxRules` has its own default.
  return MailboxRules(**rules)
