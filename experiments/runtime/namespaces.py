"""Network namespaces that last no longer than the process that made them.

A namespace has no name. It exists as long as its holder, a process that only
sleeps, or a process that was started inside it. All of them get SIGKILL when
the process that made them ends, however it ends, so nothing is left behind. As
another user than root, all namespaces lie inside a user namespace, in which the
user is root.
"""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Sequence

from experiments.runtime.command_line import UsageError

INTERFACE = "wan"  # The end of its link on a node.
SWITCH = "switch"
# The holder says when its namespace is there. Gloo finds the address to listen
# on by the name of the host, so the name of the host is the address.
_HOLD = """
import signal, socket, sys
socket.sethostname(sys.argv[1])
print("ready", flush=True)
signal.pause()
"""
_DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


class Namespaces:
  """Makes namespaces, as root or as root of a user namespace.

  Attributes:
    pids: Process that holds a namespace, by the namespace's host name.
  """

  def __init__(self, stack: contextlib.ExitStack):
    """Makes the namespace of the switch.

    Args:
      stack: Ends the holders when it closes.
    """
    self.pids: dict[str, int] = {}
    self._stack = stack
    self._enter: list[str] = []  # Options of nsenter for the user namespace.
    if os.geteuid() == 0:
      self.make(SWITCH)
    else:
      self._hold(SWITCH, ["unshare", "--user", "--map-root-user"])
      self._enter = ["--user", "--preserve-credentials"]

  @functools.cached_property
  def has_netem(self) -> bool:
    """Whether the kernel can delay packets; tried in the switch's namespace."""
    command = "tc qdisc add dev lo root netem delay 1us"
    tried = self.inside(SWITCH, command.split())
    return not subprocess.run(tried, capture_output=True).returncode

  def bridge(self, name: str) -> None:
    """Makes a namespace a switch."""
    self.run(name, *"ip link add bridge type bridge".split())
    self.run(name, *"ip link set bridge up".split())

  def make(self, name: str) -> None:
    """Makes a namespace with this host name."""
    prefix = []
    if self._enter:
      prefix = ["nsenter", f"--target={self.pids[SWITCH]}", *self._enter]
    self._hold(name, [*prefix, "unshare"])

  def _hold(self, name: str, unshare: Sequence[str]) -> None:
    command = [*unshare, "--net", "--uts", *_DIES_WITH_PARENT]
    holder = self._started(
      [*command, sys.executable, "-c", _HOLD, name],
      "this machine lets you make no network namespaces ({}): run as root, or "
      "leave the link out",
    )
    self.pids[name] = holder.pid

  def _started(
    self, command: Sequence[str], refusal: str
  ) -> subprocess.Popen[str]:
    """Starts a process that prints a line when it is ready, until the end.

    Args:
      command: The program and its arguments.
      refusal: What to say if it ends instead; {} stands for its last words.
    """
    started = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    self._stack.callback(_end, started)
    assert started.stdout and started.stderr
    if not started.stdout.readline():
      reason = started.stderr.read().strip().splitlines()[-1:]
      raise UsageError(refusal.format("".join(reason)))
    return started

  def inside(self, name: str, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command in a namespace."""
    target = f"--target={self.pids[name]}"
    enter = ["nsenter", target, *self._enter, "--net", "--uts"]
    return [*enter, *_DIES_WITH_PARENT, *command]

  def tc(self, name: str, lines: Sequence[str]) -> None:
    """Runs lines of tc in a namespace, in one process.

    Raises:
      UsageError: If one fails.
    """
    self.run(name, "tc", "-batch", "-", stdin="\n".join(lines) + "\n")

  def run(self, name: str, *command: str, stdin: str = "") -> None:
    """Runs a command in a namespace to its end.

    Args:
      name: Host name of the namespace.
      *command: The program and its arguments.
      stdin: What it reads.

    Raises:
      UsageError: If it fails.
    """
    found = subprocess.run(
      self.inside(name, command), input=stdin, capture_output=True, text=True
    )
    if found.returncode:
      raise UsageError(
        f"this machine cannot throttle links: {' '.join(command)} failed "
        f"({found.stderr.strip()})"
      )


def _end(holder: subprocess.Popen) -> None:
  holder.kill()
  holder.communicate()
