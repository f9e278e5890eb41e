"""What replicas must have in common follows from a saved config."""

import dataclasses
import json

import pytest

import dilocox_jax as dx
from dilocox_jax.config import from_mapping, may_differ
from dilocox_jax.mailbox_protocol.roster import RunMismatchError
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.training.mailbox_replica import MailboxAddress, MailboxReplica
from dilocox_jax.training.overrides import NO_OVERRIDES

SECRET = b"s" * 64


def saved(**fields):
  """A config as a run saves it."""
  values = {
    "sync.method": "diloco",
    "exchange.collective": "mailbox",
    "mesh.num_replicas": 3,
    "mailbox.quorum": 2,
    **{name.replace("__", "."): value for name, value in fields.items()},
  }
  return json.loads(json.dumps(from_mapping(values).to_mapping()))


def enter(store, terms, **changes):
  return dx.Mailbox(
    store,
    name="oslo",
    secret=SECRET,
    config={**terms.config, **changes},
    rules=terms.rules,
  )


def test_terms_are_the_fields_that_must_be_equal():
  terms = dx.mailbox_terms(saved(sync__sync_interval=7))
  assert terms.rules == dx.MailboxRules(replicas=3, quorum=2)
  assert terms.method.schedule.sync_interval == 7
  assert terms.config["sync.sync_interval"] == 7
  assert terms.config["overrides"] == []
  assert not terms.config.keys() & set(may_differ())
  assert terms.fields.keys() - terms.config.keys() == set(may_differ())


def test_another_plan_is_refused_by_the_name_of_the_field():
  store = Store("memory:///")
  terms = dx.mailbox_terms(saved())
  enter(store, terms)
  with pytest.raises(RunMismatchError) as refused:
    enter(store, terms, **{"inner.learning_rate": 0.5})
  line = str(refused.value)
  assert line.startswith("config.inner.learning_rate is 0.5 here and 0.002 in")
  assert "\n" not in line
  other = dx.mailbox_terms(saved(mailbox__quorum=1))
  with pytest.raises(RunMismatchError, match=r"quorum is 1 here and 2 in"):
    enter(store, other)


def test_a_plan_that_a_program_does_not_compute_is_refused():
  terms = dx.mailbox_terms(saved(outer__momentum=0.5))
  terms.check_computed({"outer.momentum": [0.0, 0.5]})
  with pytest.raises(ValueError) as refused:
    terms.check_computed({"outer.optimizer": ["sgd"], "outer.momentum": [0.0]})
  assert str(refused.value) == (
    "config.outer.momentum is 0.5 in this run, and this program computes only"
    " 0.0"
  )


def test_a_file_that_is_no_config_of_a_run_is_one_line():
  with pytest.raises(ValueError, match=r"lacks sync\.method, .*config\.json"):
    dx.mailbox_terms({"model_type": "llama"})
  values = saved()
  values["mailbox"]["quorum"] = 0
  with pytest.raises(ValueError, match="quorum=0"):
    dx.mailbox_terms(values)


def test_replicas_in_jax_enter_with_the_terms_of_their_config():
  values = saved()
  store = Store("memory:///")
  address = MailboxAddress(store, "rome", SECRET)
  replica = MailboxReplica(from_mapping(values), address)
  replica.with_exchange(NO_OVERRIDES, text_digest="0123")
  replica.enter(values, override_names=["model"])
  terms = dx.mailbox_terms(values, ["model"])
  content = store.get("run.json", 2**20)
  assert content is not None
  record = json.loads(bytes(content))["is"]
  assert record["config"] == terms.config
  assert record["rules"] == dataclasses.asdict(terms.rules)
  assert record["text"] == "0123"
