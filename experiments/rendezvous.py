"""Tells replicas that come and go when to train together.

  python -m experiments.rendezvous --port=7000 --num_replicas=3 --bind=HOST

Run it on a machine that stays. On every replica, in any order:

  python -m experiments.train --elastic=HOST:7000 --config=... --workdir=...

The work directory may be one for all or each replica's own. A replica that is
lost costs the run what came after its last save; the others go on without it.
The same command on that replica lets it come back, even if its directory is
gone: the others save at the end of their segment, and all go on together.
SIGTERM or Ctrl-C to this program stops the whole run after a save.

Without --bind only this machine reaches it. Whoever reaches the port is trusted
like the user of the run: keep it inside a private network.
"""

import asyncio
import ipaddress
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator

from absl import flags

from experiments.runtime import command_line, elastic_agent
from experiments.runtime.rendezvous_rules import Rendezvous

_TICK_S = 0.2
_NOT_A_MESSAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)


def define_flags() -> None:
  """Defines the flags of this binary."""
  flags.DEFINE_integer(
    "port", 7000, "TCP port on which replicas are awaited.", 1, 65_535
  )
  flags.DEFINE_string(
    "bind",
    "127.0.0.1",
    "Address of this machine at which replicas are awaited. Replicas on other "
    "machines need one that they reach; whoever reaches it is trusted.",
  )
  for name, default, text in (
    ("num_replicas", 2, "Largest number of replicas; others wait as spares."),
    ("min_replicas", 1, "Smallest number of replicas that train."),
  ):
    flags.DEFINE_integer(name, default, text, lower_bound=1)
  text = "Seconds without a change before fewer than all replicas start."
  flags.DEFINE_float("settle_s", 10.0, text, lower_bound=0.0)


def main(values: flags.FlagValues) -> None:
  """Serves until the run has ended."""
  with command_line.usage_errors("--"):
    sizes = values.num_replicas, values.min_replicas, values.settle_s
    rules = Rendezvous(*sizes)
  if code := asyncio.run(serve(rules, values.bind, values.port)):
    sys.exit(code)


async def serve(rules: Rendezvous, bind: str, port: int) -> int:
  """Serves until the run has ended and all agents have gone.

  Args:
    rules: The run, without members.
    bind: Address of this machine.
    port: TCP port.

  Returns:
    Exit code of the run.

  Raises:
    UsageError: If the address is none of this machine, or the port not free.
  """
  connected: set[asyncio.StreamWriter] = set()
  opened: set[asyncio.StreamWriter] = set()  # Those that say nothing, too.

  async def attend(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    opened.add(writer)
    try:
      async for address, code in _messages(reader, writer):
        connected.add(writer)
        rules.wait(writer, address, code, time.monotonic())
    except _NOT_A_MESSAGE as error:
      if rules.code is None:  # When a run ends, so do all connections.
        logging.getLogger(__name__).warning("a connection ended: %s", error)
    finally:
      rules.lost(writer, time.monotonic())
      connected.discard(writer)
      opened.discard(writer)
      writer.close()

  try:
    server = await asyncio.start_server(attend, bind, port)
  except OSError as error:
    raise command_line.UsageError(
      f"--bind={bind} --port={port} cannot be used ({error.strerror}): take an "
      "address of this machine, and a free port"
    ) from error
  places = [socket.getsockname()[0] for socket in server.sockets]
  if not all(ipaddress.ip_address(place).is_loopback for place in places):
    logging.getLogger(__name__).warning(
      "whoever reaches %s:%d is trusted: keep it inside a private network",
      *(bind, port),
    )
  loop = asyncio.get_running_loop()
  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, rules.stop, number)
  async with server:
    while rules.code is None or connected:
      _tell(rules)
      await asyncio.sleep(_TICK_S)
    for writer in opened:  # From Python 3.12 on a server waits for all of them.
      writer.close()
  return rules.code


async def _messages(
  reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[tuple[str, int | None]]:
  """Yields what an agent says, until its connection ends."""
  elastic_agent.watch(writer.get_extra_info("socket"))
  while line := await reader.readline():
    message = json.loads(line)
    yield message["address"], message["code"]


def _tell(rules: Rendezvous) -> None:
  """Sends the orders that are due."""
  for agent, order in rules.orders(time.monotonic()):
    if order.kind != "start" or order.rank == 0:
      place = f" of {order.count} at {order.coordinator}" if order.count else ""
      print(f"{order.kind}{place}", flush=True)
    agent.write(json.dumps(vars(order)).encode() + b"\n")


if __name__ == "__main__":
  command_line.main(main, define_flags)
