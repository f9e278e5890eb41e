"""Without a coordinator; several processes stand in test_host_arrays.py."""

import pytest

from dilocox_jax.distributed import coordinator_store


@pytest.mark.parametrize(
  "messages", [[b""], [b"", b"own", b""], [b"\0" * 300, b"\xff"]]
)
def test_messages_come_apart_as_they_were(messages):
  assert coordinator_store._split(coordinator_store._join(messages)) == messages


def test_a_process_that_is_alone_hears_itself():
  assert coordinator_store.allgather(b"own") == [b"own"]
