"""What is decided once stays decided when one of its two objects is lost."""

import pytest

from dilocox_jax.mailbox_protocol.decisions import Decisions
from dilocox_jax.mailbox_protocol.signer import JSON_BYTES, Signer
from dilocox_jax.mailbox_protocol.store import RetryingStore, Store

SIGNER = Signer(b"secret", "run")
PATH = "manifest/0.0"
PROPOSAL = "proposal/0.0"
DAMAGES = {
  "deleted": lambda store, path: store.delete([path]),
  "damaged": lambda store, path: store.put(path, b"damaged"),
}


@pytest.fixture(name="store")
def store_fixture():
  return Store("memory:///")


def decide(store, value):
  patient = RetryingStore(store, pause=lambda seconds: None)
  decisions = Decisions(patient, SIGNER)
  return decisions.decide(PATH, PROPOSAL, {"list": value})["list"]


def says(store, path):
  return SIGNER.verify_json(path, store.get(path, JSON_BYTES))


def test_the_first_one_decides(store):
  assert [decide(store, value) for value in "ab"] == ["a", "a"]
  assert says(store, PATH) == says(store, PROPOSAL) == {"list": "a"}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("path", [PATH, PROPOSAL])
def test_the_loss_of_one_object_changes_no_decision(store, path, damage):
  decide(store, "a")
  damage(store, path)
  assert decide(store, "b") == "a"
  assert says(store, PATH) == {"list": "a"}


def test_a_replica_that_died_between_both_objects_is_followed(store):
  class Dying:
    """Its process is killed when it creates the second object."""

    def __getattr__(self, name):
      return getattr(store, name)

    def create(self, path, data):
      if path == PATH:
        raise KeyboardInterrupt
      return store.create(path, data)

  with pytest.raises(KeyboardInterrupt):
    decide(Dying(), "a")
  assert says(store, PATH) is None
  patient = RetryingStore(store, pause=lambda seconds: None)
  complete = Decisions(patient, SIGNER).complete
  assert complete(PATH, PROPOSAL) == {"list": "a"}
  assert says(store, PATH) == {"list": "a"}
  assert decide(store, "b") == "a"
  assert complete("manifest/1.0", "proposal/1.0") is None


def test_an_object_that_cannot_be_read_yet_is_waited_for(store):
  """A network folder may say for seconds that a new file is not there."""
  decide(store, "a")
  slept = []

  class Lagging:
    def __getattr__(self, name):
      return getattr(store, name)

    def get(self, path, at_most):
      return store.get(path, at_most) if sum(slept) > 12 else None

  patient = RetryingStore(Lagging(), pause=slept.append)
  decided = Decisions(patient, SIGNER).decide(PATH, PROPOSAL, {"list": "b"})
  assert decided == {"list": "a"} and says(store, PATH) == {"list": "a"}
