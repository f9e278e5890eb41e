"""What an agent needs before it can join. tests/experiments/test_rendezvous.py
has agents with processes."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments.runtime import elastic_agent
from experiments.runtime.command_line import UsageError


@pytest.mark.parametrize(
  ("address", "reason"),
  [
    ("somewhere", "--elastic=somewhere has no port: give HOST:PORT"),
    ("somewhere:x", "has no port"),
    ("somewhere:65536", "has no port"),
    ("a..b:1", "nothing answers at --elastic=a..b:1"),
    ("[::1]:1", r"nothing answers at --elastic=::1:1 \("),
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


def test_another_service_at_the_address_is_one_line():
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]

    def greet():
      with server.accept()[0] as connection:
        connection.sendall(b"SSH-2.0-OpenSSH\r\n")
        connection.recv(1000)

    with ThreadPoolExecutor(1) as thread:
      thread.submit(greet)
      with pytest.raises(UsageError, match=f"{port} is no rendezvous: "):
        elastic_agent.attend(f"127.0.0.1:{port}", lambda _: [])
