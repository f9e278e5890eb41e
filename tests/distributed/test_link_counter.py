import math

import pytest

from dilocox_jax.distributed import link_counter

TABLE = """Inter-|   Receive                     |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets
    lo:     100  1 0 0 0 0 0 0      100  1 0 0 0 0 0 0
   wan: {received}  9 0 0 0 0 0 0 {sent}  8 0 0 0 0 0 0
"""


@pytest.fixture(name="write")
def write_fixture(tmp_path, monkeypatch):
  path = tmp_path / "dev"
  real = link_counter.sent_bytes
  monkeypatch.setattr(
    link_counter, "sent_bytes", lambda interface: real(interface, str(path))
  )
  return lambda sent: path.write_text(TABLE.format(received=7, sent=sent))


def test_what_left_since_the_last_call_is_counted(write, monkeypatch):
  monkeypatch.setenv(link_counter.LINK_VARIABLE, "wan")
  write(1000)
  counter = link_counter.LinkCounter()
  write(1250)
  assert counter.new_bytes() == 250
  assert counter.new_bytes() == 0


def test_without_a_link_there_is_nothing_to_count(monkeypatch):
  monkeypatch.delenv(link_counter.LINK_VARIABLE, raising=False)
  assert math.isnan(link_counter.LinkCounter().new_bytes())


def test_a_link_that_is_not_there_is_named(write, monkeypatch):
  monkeypatch.setenv(link_counter.LINK_VARIABLE, "eth7")
  write(0)
  with pytest.raises(ValueError, match="eth7 is no network interface"):
    link_counter.LinkCounter()
