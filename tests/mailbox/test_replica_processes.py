"""Process 0 of a replica has the mailbox, and tells the others its answers."""

import json
import queue

import numpy as np
import pytest

from dilocox_jax.mailbox_protocol.agreement import (
  ReplicaStaleError,
  StoppedError,
)
from dilocox_jax.mailbox_protocol.client import MailboxClient
from dilocox_jax.mailbox_protocol.fingerprints import NOTHING
from dilocox_jax.mailbox_protocol.mailbox import Exchanged, Mailbox
from dilocox_jax.mailbox_protocol.replica_processes import (
  decode_answer,
  decode_error,
  encode_answer,
  encode_error,
)
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.threads import in_thread

SECRET = b"s" * 64


class Linked:
  """A process of two. Process 0 puts its answers into a queue."""

  is_stop_requested = False

  def __init__(self, told, is_main):
    self.told = told
    self.is_main = is_main

  def from_main(self, ask, shared=None):
    if self.is_main:
      try:
        answer = ask()
      except Exception as error:
        self.told.put(encode_error(error))
        raise
      value, arrays = encode_answer(answer)
      self.told.put((json.dumps(value), arrays))
      return answer
    first, second = self.told.get(timeout=60)
    if isinstance(second, str):
      raise decode_error(first, second)
    return decode_answer(json.loads(first), second)

  def collected(self, arrays):
    return arrays

  def request_stop(self):
    """Tells nobody."""


def clients():
  """The clients of process 0 and of process 1 of one replica."""
  store = Store("memory:///")
  told = queue.Queue()

  def client(is_main):
    def open_mailbox(config):
      assert is_main, "only process 0 has the secret"
      return Mailbox(
        store,
        name="oslo",
        secret=SECRET,
        config=config,
        rules=MailboxRules(replicas=1),
      )

    return MailboxClient(
      open_mailbox=open_mailbox,
      terms={},
      step_weight=1.0,
      keeps=False,
      grace_s=60.0,
      name="oslo",
      processes=Linked(told, is_main),
    )

  return client(True), client(False)


def in_both(function):
  """What a function of a client returns in both processes."""
  both = clients()
  futures = [in_thread(function, client) for client in both]
  return [future.result(timeout=100) for future in futures]


def test_both_processes_get_the_messages_and_the_state():
  message = [np.array([1, 2], np.float32), np.zeros((0, 3), np.int8)]

  def exchange(client):
    client.enter({"learning_rate": 1.0})
    assert client.newest() is None
    assert client.take_part(0)
    signs = client.signs()
    session = client.exchange(0, 2, lambda: NOTHING)
    # Only process 0 has the values.
    sent = message
    if not client.processes.is_main:
      sent = [np.zeros_like(array) for array in message]
    result = session.send(sent, is_finite=True, shared=lambda: message)
    return signs, result, client.settled, client.get_state(), client.seat

  one, other = in_both(exchange)
  # In the answers that process 1 gets, tuples have become lists.
  assert json.dumps(one[2:]) == json.dumps(other[2:])
  np.testing.assert_array_equal(one[0], other[0])
  for arrays, weights, is_listed in (one[1], other[1]):
    assert weights == [1] and is_listed
    for array, wanted in zip(arrays, message, strict=True):
      np.testing.assert_array_equal(array, wanted[np.newaxis])


def test_both_processes_get_the_same_error():
  def set_wrong_state(client):
    client.enter({})
    state = {**client.get_state(), "run": "another"}
    with pytest.raises(ValueError, match="holds another run") as error:
      client.set_state(state)
    return str(error.value)

  one, other = in_both(set_wrong_state)
  assert one == other


def test_an_answer_arrives_as_it_was():
  arrays = [np.array([[1.5]], np.float32), np.arange(3)]
  answer = Exchanged([("oslo", 0.1, arrays)], False, {"rome": "late"}, True)
  value, sent = encode_answer(answer)
  found = decode_answer(json.loads(json.dumps(value)), sent)
  assert isinstance(found, Exchanged)
  assert found.messages == [["oslo", 0.1, arrays]]
  assert found[1:-1] == answer[1:-1]
  assert found.wrong_shares == []  # Tuples become lists.
  for plain in (None, True, 7, {"a": [1, {"array": 2}]}):
    value, sent = encode_answer(plain)
    assert decode_answer(json.loads(json.dumps(value)), sent) == plain


@pytest.mark.parametrize(
  ("error", "kind"),
  [
    (ReplicaStaleError("event 3"), ReplicaStaleError),
    (StoppedError("asked"), StoppedError),
    (PermissionError("no"), OSError),
    (KeyError("bug"), RuntimeError),
  ],
)
def test_an_error_keeps_its_kind_and_its_line(error, kind):
  found = decode_error(*encode_error(error))
  assert type(found) is kind and str(error) in str(found)
