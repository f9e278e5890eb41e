"""What an agent needs before it can join. tests/experiments/test_rendezvous.py
has agents with processes."""

import pytest

from experiments.runtime import elastic_agent
from experiments.runtime.command_line import UsageError


@pytest.mark.parametrize(
  ("address", "reason"),
  [
    ("somewhere", "--elastic=somewhere has no port: give HOST:PORT"),
    ("somewhere:x", "has no port"),
    (
      "127.0.0.1:1",
      r"nothing answers at --elastic=127.0.0.1:1 \(Connect call failed",
    ),
  ],
)
def test_a_wrong_address_is_one_line(monkeypatch, address, reason):
  monkeypatch.setattr(elastic_agent, "_CONNECT_S", 1)
  with pytest.raises(UsageError, match=reason):
    elastic_agent.attend(address, lambda _: [])
