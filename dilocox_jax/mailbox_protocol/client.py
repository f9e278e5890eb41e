"""The client of a mailbox: exchanges the messages of one replica's rounds.

Rounds ask it for one exchange after the other (`rounds.mailbox_runtime`). For
each turn of an exchange, it sends this replica's message and returns the
messages of all replicas that are listed in the manifest.
"""

import atexit
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from dilocox_jax.mailbox_protocol.agreement import StoppedError
from dilocox_jax.mailbox_protocol.fingerprints import Fingerprint
from dilocox_jax.mailbox_protocol.mailbox import Exchanged, Mailbox
from dilocox_jax.mailbox_protocol.replica_processes import (
  OneProcess,
  ReplicaProcesses,
  TakeArrays,
)
from dilocox_jax.mailbox_protocol.step_counts import StepCounts
from dilocox_jax.reference.fingerprint import random_signs
from dilocox_jax.reference.shares import Tables
from dilocox_jax.threads import in_thread

NEVER = 2**62  # Number of an event that no run reaches.
LOOK_EVERY_S = 0.5


@dataclasses.dataclass(eq=False)
class MailboxClient:
  """The mailbox of a run, and how far the run has come.

  A server may take a request and not answer it for minutes, and an exchange
  without a quorum takes even longer. So the client calls the mailbox in
  threads. Ctrl-C then works at once. A run that was asked to stop waits no
  longer than the grace time plus the duration of the last exchange.

  A replica may have several processes. Each has a client, and all clients are
  asked the same. Process 0 asks the mailbox, and the others get its answers
  (`replica_processes`).

  Attributes:
    open_mailbox: Function from `config`, the values that must be equal in all
      replicas, to the mailbox.
    terms: The part of `config` that is known before the run is entered.
    step_weight: Weight of one inner step of this replica in the mean.
    keeps: Whether the replica keeps values that were not sent, by error
      feedback or in its parameters. The aggregator then sends them later, so
      nothing of a late message is lost.
    grace_s: Grace time of the run's rules, in seconds.
    event: Number of the next exchange.
    settled: Events that were settled since this list was emptied last. Each has
      its number "event"; "members", the replicas whose messages were averaged;
      and "left_out", the reasons why other messages were not, by replica.
    writes_snapshots: Whether this replica may write a snapshot.
    first_own: Number of the first exchange that this replica takes part in.
    stop: Set, perhaps in another thread, to ask the run to stop.
    last_s: Seconds that the last exchange took.
    written: The newest snapshot that is being written or was written, as a list
      of at most one future. It is written after all earlier ones.
    steps: The inner steps behind this replica's messages.
    name: Name of this replica.
    processes: The processes of this replica.
    run: Identity of the run, once it was entered.
    mailbox: The mailbox, once the run was entered. Only process 0 has it.
  """

  open_mailbox: Callable[..., Mailbox]
  terms: Mapping[str, Any]
  step_weight: float
  keeps: bool
  grace_s: float
  name: str = ""
  processes: ReplicaProcesses = dataclasses.field(default_factory=OneProcess)
  event: int = 0
  settled: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  writes_snapshots: bool = True
  first_own: int = 0
  stop: threading.Event = dataclasses.field(default_factory=threading.Event)
  last_s: float = 0.0
  written: list[Future] = dataclasses.field(default_factory=list)
  steps: StepCounts = dataclasses.field(default_factory=StepCounts)
  run: str = dataclasses.field(init=False)
  mailbox: Mailbox = dataclasses.field(init=False)

  def enter(self, terms: Mapping[str, Any]) -> None:
    """Enters the run.

    Args:
      terms: The values that must be equal in all replicas, beside `self.terms`.
    """
    config = {**self.terms, **terms}

    def open_and_identify() -> str:
      self.mailbox = self._wait_for(self.open_mailbox, config=config)
      self.mailbox.beside = self._write_in_thread
      atexit.register(self._wait_for_snapshots)
      return self.mailbox.run

    self.run = self.processes.from_main(open_and_identify)

  def request_stop(self) -> None:
    """Asks the run to stop, perhaps in another thread."""
    self.stop.set()
    self.processes.request_stop()

  def _ask(
    self,
    method: str,
    *args: Any,
    shared: TakeArrays | None = None,
    **kwargs: Any,
  ) -> Any:
    """Returns what a method of the mailbox returns, in all processes.

    Args:
      method: Name of the method.
      *args: Its arguments.
      shared: Arrays of all processes that the mailbox may read
        (`ReplicaProcesses.from_main`).
      **kwargs: Its keyword arguments.

    Raises:
      Exception: The error of the method, in all processes.
    """

    def ask() -> Any:
      return self._wait_for(getattr(self.mailbox, method), *args, **kwargs)

    return self.processes.from_main(ask, shared)

  @property
  def seat(self) -> int:
    """Index of this replica's seat (`Mailbox.seat`)."""
    return self.processes.from_main(lambda: self.mailbox.seat)

  @property
  def usage(self) -> dict[str, int]:
    """Requests and bytes of this replica (`Mailbox.usage`)."""
    return self.processes.from_main(lambda: self.mailbox.usage)

  def _wait_for(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that asks the store, and waits for its result.

    Args:
      call: The function. It runs in a thread.
      *args: Its arguments.
      **kwargs: Its keyword arguments.

    Returns:
      The result of the function.

    Raises:
      StoppedError: If the call does not end although the run was asked to stop.
    """
    future = in_thread(call, *args, **kwargs)
    while wait([future], LOOK_EVERY_S).not_done:
      most_s = self.grace_s + self.last_s
      is_asked = self.stop.is_set() or self.processes.is_stop_requested
      if is_asked and wait([future], most_s).not_done:
        raise StoppedError(
          f"gave up on the store, {most_s:.0f} s after the run was asked to"
          " stop"
        )
    return future.result()

  def _write_in_thread(self, write: Callable[[], None]) -> None:
    """Writes a snapshot in a thread, after all earlier snapshots."""
    earlier = self.written

    def write_after_earlier() -> None:
      wait(earlier)
      write()

    self.written = [in_thread(write_after_earlier)]

  def _wait_for_snapshots(self) -> None:
    """Waits up to the grace time, at the end of the program, for snapshots."""
    if wait(self.written, self.grace_s).not_done:
      logging.getLogger(__name__).warning(
        "gave up a snapshot that was not written %g s after the run",
        self.grace_s,
      )

  def newest(self) -> list[np.ndarray] | None:
    """Reads the newest snapshot, and goes back to it.

    The next exchange is that of the first event whose result the snapshot does
    not have.

    Returns:
      The arrays of the snapshot; None if there is none.
    """
    snapshot = self._ask("newest")
    # This replica has no part in the exchanges that are in flight in the
    # snapshot.
    self.first_own = NEVER
    if snapshot is None:
      self.event = 0
      return None
    self.event = snapshot.first
    return snapshot.arrays

  def get_state(self) -> dict[str, Any]:
    """Returns the state of this client for `set_state`, as values of JSON."""
    mailbox = self.processes.from_main(lambda: self.mailbox.get_state())
    return {
      "event": self.event,
      "first_own": self.first_own,
      "steps": self.steps.get_state(),
      **mailbox,
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on where `get_state` was called, perhaps in an earlier process."""
    self.event = state["event"]
    self.first_own = state["first_own"]
    self.steps.set_state(state["steps"])
    self.processes.from_main(lambda: self.mailbox.set_state(state))

  def take_part(self, num_in_flight: int) -> bool:
    """Takes part in the exchanges of what is measured from now on.

    Args:
      num_in_flight: Number of exchanges that are in flight. They come before
        the first exchange of a new measurement.

    Returns:
      Whether this replica takes part. If the other replicas have settled that
      event already, it does not, and has to follow them further.
    """
    if not self.announce(self.event + num_in_flight):
      return False
    self.first_own = self.event + num_in_flight
    return True

  def announce(self, event: int) -> bool:
    """Announces this replica for an event (`Mailbox.announce`)."""
    return self._ask("announce", event)

  def signs(self) -> np.ndarray:
    """Returns the random signs of the next event (`Mailbox.signs`)."""
    return random_signs(self.run, self.event)

  def exchange(
    self,
    kind: int,
    num_steps: int,
    take_fingerprint: Callable[[], Fingerprint],
  ) -> "ExchangeSession":
    """Begins the next exchange.

    Args:
      kind: Number that is equal for exchanges with messages of one size, e.g.
        the number of the fragment.
      num_steps: Number of inner steps behind this replica's message. With 0
        steps the message counts as one of 1 step, because it may carry values
        that were held back.
      take_fingerprint: Returns the fingerprint of the shared state of this
        kind, under the signs of the event (`signs`).
    """
    event = self.event
    self.event += 1
    attends = event >= self.first_own and self.announce(event)
    return ExchangeSession(
      client=self,
      event=event,
      kind=kind,
      attends=attends,
      weight=self.step_weight * max(num_steps, 1),
      state=take_fingerprint(),
    )

  def turn(self, *args: Any, **kwargs: Any) -> Exchanged:
    """Exchanges the messages of a turn (`Mailbox.exchange`)."""
    start_s = time.monotonic()
    exchanged = self._ask("exchange", *args, **kwargs)
    self.last_s = time.monotonic() - start_s
    return exchanged


class ExchangeSession:
  """One exchange, with one or several turns.

  Attributes:
    is_counted: Whether this replica's messages were listed in all turns so far.
    drops_all: Whether this replica must drop all values of the fragment that it
      sends or holds back. The reason is that a message of this replica was left
      out for its values, or that a message of an earlier life counts instead.
  """

  def __init__(
    self,
    client: MailboxClient,
    *,
    event: int,
    kind: int,
    attends: bool,
    weight: float,
    state: Fingerprint,
  ):
    """Sends nothing yet.

    Args:
      client: The client of the mailbox.
      event: Number of the event.
      kind: As in `MailboxClient.exchange`.
      attends: Whether this replica sends messages.
      weight: Weight of this replica's messages.
      state: Fingerprint of the shared state.
    """
    self._client = client
    self._event = event
    self._kind = kind
    self._attends = attends
    self._weight = weight
    self._state = state
    self._turn = 0
    self.is_counted = True
    self.drops_all = False

  def send(
    self,
    arrays: Sequence[np.ndarray],
    is_finite: bool,
    shared: Callable[[], Sequence[np.ndarray]],
    tables: Tables | None = None,
  ) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Sends the next turn's message, and returns the messages that all average.

    Args:
      arrays: The arrays of the message.
      is_finite: Whether this replica's values are finite. If not, the message
        has the weight 0. It is then left out, but nobody waits for it.
      shared: Returns the arrays that all replicas share, for a snapshot.
      tables: How the arrays are encoded; None: the mean is not made in shares.

    Returns:
      Arrays [K, ...] of the K replicas that are listed, their weights in the
      mean [K], which add up to K, and whether this replica is one of them. If
      no replica is listed, zeros [1, ...] with the weight 0. If the mean was
      made in shares, its arrays [1, ...] with the weight 1.
    """
    turn = self._turn
    self._turn += 1

    def take_snapshot() -> tuple[int, Sequence[np.ndarray]]:
      return self._event, self._client.processes.collected(shared())

    exchanged = self._client.turn(
      self._event,
      turn,
      arrays,
      weight=self._weight if is_finite else 0.0,
      send=self._attends,
      state=self._state,
      kind=self._kind,
      snapshot=take_snapshot if self._client.writes_snapshots else None,
      shared=shared,
      tables=tables,
    )
    if not exchanged.is_own_listed:
      self.is_counted = False
    is_left_out = self._client.name in exchanged.left_out
    if exchanged.is_superseded or is_left_out:
      self.drops_all = True
    if turn == 0:
      self._client.settled.append(
        {
          "event": self._event,
          "members": [name for name, _, _ in exchanged.messages],
          "left_out": exchanged.left_out,
        }
      )
    is_listed = np.asarray(exchanged.is_own_listed)
    if not exchanged.messages:
      zeros = tuple(np.zeros_like(array)[np.newaxis] for array in arrays)
      return zeros, np.zeros(1, np.float32), is_listed
    if exchanged.mean is not None:
      mean = tuple(np.asarray(array)[np.newaxis] for array in exchanged.mean)
      return mean, np.ones(1, np.float32), is_listed
    contents = [content for _, _, content in exchanged.messages]
    weights = np.array(
      [weight for _, weight, _ in exchanged.messages], np.float64
    )
    weights *= len(weights) / weights.sum()
    stacked = tuple(
      np.stack(arrays_of_replicas)
      for arrays_of_replicas in zip(*contents, strict=True)
    )
    return stacked, weights.astype(np.float32), is_listed
