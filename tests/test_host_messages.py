"""Without a coordinator; several processes stand in test_gathering.py."""

import pytest

from dilocox_jax import host_messages


@pytest.mark.parametrize(
  "messages", [[b""], [b"", b"own", b""], [b"\0" * 300, b"\xff"]]
)
def test_messages_come_apart_as_they_were(messages):
  assert host_messages._split(host_messages._join(messages)) == messages


def test_a_process_that_is_alone_hears_itself():
  assert host_messages.allgather(b"own") == [b"own"]
