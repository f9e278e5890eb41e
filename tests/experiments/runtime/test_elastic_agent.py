"""What an agent needs before it can join. tests/experiments/test_rendezvous.py
has agents with processes."""

import asyncio
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments.runtime import elastic_agent
from experiments.runtime.command_line import UsageError
from experiments.runtime.rendezvous_rules import Order


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


class _Writer:
  """A connection that nobody reads."""

  def close(self):
    pass


@pytest.mark.parametrize("comes", ["before", "meanwhile"])
def test_a_signal_reaches_a_process_that_is_being_made(monkeypatch, comes):
  made = []
  start = asyncio.create_subprocess_exec

  async def order():
    agent = elastic_agent._Agent(
      lambda _: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    agent._writer = _Writer()  # pyright: ignore[reportAttributeAccessIssue]

    async def starting(*command, **options):
      agent._leave(signal.SIGTERM)
      del options["preexec_fn"]  # It forks, and the tests have threads.
      made.append(await start(*command, **options))
      return made[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    if comes == "before":
      agent._leave(signal.SIGTERM)
    await agent._obey(Order("start", 0, 1, "127.0.0.1:1"))
    return await asyncio.wait_for(agent._ended(), 20)

  code = asyncio.run(order())
  assert (len(made), code) == {
    "before": (0, None),
    "meanwhile": (1, -signal.SIGTERM),
  }[comes]
