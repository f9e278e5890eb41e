import logging

from dilocox_jax.meeting.patience import Patient
from dilocox_jax.meeting.store import AwayError


class AwayStore:
  """Answers from a moment on."""

  where = "s3://bucket/run"

  def __init__(self, back_at):
    self.now, self.back_at = 0.0, back_at

  def _answer(self, value):
    if self.now < self.back_at:
      raise AwayError("no route to host")
    return value

  def get(self, path, at_most):
    return self._answer(path.encode())

  def create(self, path, data):
    return self._answer(True)

  def put(self, path, data):
    self._answer(None)

  def delete(self, paths):
    self._answer(None)

  def sizes(self, prefix):
    return self._answer({prefix: 1})

  def pause(self, seconds):
    self.now += seconds


def patient(back_at):
  store = AwayStore(back_at)
  return store, Patient(store, lambda: store.now, store.pause)


def test_every_call_waits_until_the_store_is_back():
  for call, expected in [
    (lambda p: p.get("a", 1), b"a"),
    (lambda p: p.create("a", b""), True),
    (lambda p: p.put("a", b""), None),
    (lambda p: p.delete(["a"]), None),
    (lambda p: p.sizes("a"), {"a": 1}),
  ]:
    store, waiting = patient(20)
    assert call(waiting) == expected
    assert 20 <= store.now < 26


def test_one_line_a_minute_says_what_is_waited_for(caplog):
  caplog.set_level(logging.INFO)
  _, waiting = patient(170)
  waiting.get("a", 1)
  lines = [record.getMessage() for record in caplog.records]
  assert len(lines) == 4
  assert lines[0] == "waiting for s3://bucket/run: no route to host"
  assert "is back after 17" in lines[-1]


def test_a_store_that_answers_is_not_mentioned(caplog):
  _, waiting = patient(0)
  waiting.get("a", 1)
  assert not caplog.records
