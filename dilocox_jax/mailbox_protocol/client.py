"""Lets a training loop exchange messages through a mailbox.

`MailboxClient` calls a `mailbox.Mailbox` in threads, so that a run can be
stopped while the store (a folder or a bucket) does not answer.
`ExchangeSession` exchanges the messages of one event (exchange).
"""

import atexit
import collections
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
LOOK_EVERY_S = 0.5  # How often a waiting client looks whether it should stop.


@dataclasses.dataclass(eq=False)
class MailboxClient:
  """Calls a mailbox for a training loop, and counts the exchanges.

  Every call that needs the store (a folder or a bucket) runs in a thread. So
  the run can be stopped also while the store does not answer. The call then
  raises `StoppedError`.

  A replica may have several processes. Each has a client, and all clients get
  the same calls in the same order. Only process 0 has a mailbox, and the others
  get its answers (`replica_processes`).

  An event is one exchange. A snapshot is a copy of the state that all replicas
  share before an event.

  Attributes:
    open_mailbox: Function that opens the mailbox. It is called with one keyword
      argument `config`: the values that must be equal in all replicas.
    terms: The part of `config` that is known before `enter`.
    terms_of_devices: The part of `config` that follows from the devices of this
      replica. It must also be equal in all replicas.
    step_weight: Weight of one inner step of this replica in the mean.
    keeps: Whether the replica keeps values that were not sent (by error
      feedback or in its parameters), and sends them later.
    grace_s: Grace time (`MailboxRules.grace_s`), in seconds.
    name: Name of this replica.
    processes: Calls process 0 of this replica, and brings the results to its
      other processes.
    event: Number of the next exchange.
    settled: A dict for each exchange since the caller last emptied this list.
      Its keys are "event" (number of the exchange), "members" (replicas in the
      mean), "left_out" (reason by replica) and "wrong_shares". The last one
      counts the shares (means of one slice of all messages) that this replica
      has found to be wrong since the exchange before, by the replica that had
      to make them.
    writes_snapshots: Whether this replica may write a snapshot.
    first_own: Number of the first exchange that this replica takes part in.
      It is `NEVER` after `newest`, until `take_part` returns True.
    stop: `threading.Event` that any thread may set to ask the run to stop.
    last_s: Seconds that the last call of `turn` took.
    written: At most one future, which is done when all tasks of the mailbox,
      such as writing a snapshot, are done.
    steps: Counts the inner steps behind this replica's messages.
    run: Identifier of the run; only set after `enter`.
    mailbox: The mailbox; only set after `enter`, and only in process 0.
  """

  open_mailbox: Callable[..., Mailbox]
  terms: Mapping[str, Any]
  step_weight: float
  keeps: bool
  grace_s: float
  name: str = ""
  processes: ReplicaProcesses = dataclasses.field(default_factory=OneProcess)
  terms_of_devices: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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
    """Opens the mailbox, which joins the run or begins it. Sets `run`.

    Args:
      terms: More values that must be equal in all replicas, beside those in
        `self.terms` and `self.terms_of_devices`.

    Raises:
      ValueError: If the mailbox refuses, e.g. because the other replicas have
        other values.
      StoppedError: If the run was asked to stop and the store does not answer.
    """
    config = {**self.terms, **terms, **self.terms_of_devices}

    def open_and_identify() -> str:
      self.mailbox = self._wait_for(self.open_mailbox, config=config)
      self.mailbox.beside = self._write_in_thread
      atexit.register(self._wait_for_snapshots)
      return self.mailbox.run

    self.run = self.processes.from_main(open_and_identify)

  def request_stop(self) -> None:
    """Asks the run to stop. Any thread may call this method."""
    self.stop.set()
    self.processes.request_stop()

  def _ask(
    self,
    method: str,
    *args: Any,
    shared: TakeArrays | None = None,
    **kwargs: Any,
  ) -> Any:
    """Calls a method of process 0's mailbox. All processes get its result.

    Meanwhile, the mailbox may read the arrays that `shared` returns, also if
    their parts are in several processes. An error is raised in all processes.
    """

    def ask() -> Any:
      return self._wait_for(getattr(self.mailbox, method), *args, **kwargs)

    return self.processes.from_main(ask, shared)

  @property
  def seat(self) -> int:
    """Place of this replica in the order of joining, from 0.

    It is 0 if it is not known yet.
    """
    return self.processes.from_main(lambda: self.mailbox.seat)

  @property
  def usage(self) -> dict[str, int]:
    """Number of requests, and bytes sent and read, so far (`Mailbox.usage`)."""
    return self.processes.from_main(lambda: self.mailbox.usage)

  def _wait_for(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a function in a thread, and returns its result.

    Raises:
      StoppedError: If the run was asked to stop, and the call has not ended
        within `grace_s` plus `last_s` seconds after that.
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
    """Runs a task, e.g. writes a snapshot, in a thread after earlier tasks."""
    earlier = self.written

    def write_after_earlier() -> None:
      wait(earlier)
      write()

    self.written = [in_thread(write_after_earlier)]

  def _wait_for_snapshots(self) -> None:
    """Waits up to `grace_s` seconds for tasks that run, such as a snapshot."""
    if wait(self.written, self.grace_s).not_done:
      logging.getLogger(__name__).warning(
        "gave up a snapshot that was not written %g s after the run",
        self.grace_s,
      )

  def newest(self) -> list[np.ndarray] | None:
    """Reads the newest snapshot, and sets `event` to continue from there.

    A snapshot is a copy of the state that all replicas share before an event
    (exchange). `event` becomes the first exchange whose result the snapshot
    does not have. Without a snapshot, `event` becomes 0. This replica takes
    part in no exchange until `take_part`.

    Returns:
      The arrays of the snapshot. If no snapshot can be read, the result is
      None, and the caller begins with the initial parameters.

    Raises:
      StoppedError: If no snapshot can be read although the first events are
        deleted. This is only checked if this replica has come to no further
        exchange since the previous call. Also if the run was asked to stop and
        the store does not answer.
    """
    snapshot = self._ask("newest")
    # Some exchanges may be in flight in the snapshot. This replica has sent
    # nothing for them.
    self.first_own = NEVER
    if snapshot is None:
      self.event = 0
      return None
    self.event = snapshot.first
    return snapshot.arrays

  def get_state(self) -> dict[str, Any]:
    """Returns the state of this client for a checkpoint, as values of JSON."""
    mailbox = self.processes.from_main(lambda: self.mailbox.get_state())
    return {
      "event": self.event,
      "first_own": self.first_own,
      "steps": self.steps.get_state(),
      **mailbox,
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Restores what `get_state` returned, perhaps in an earlier process.

    Raises:
      ValueError: If the state is that of another run.
    """
    self.event = state["event"]
    self.first_own = state["first_own"]
    self.steps.set_state(state["steps"])
    self.processes.from_main(lambda: self.mailbox.set_state(state))

  def take_part(self, num_in_flight: int) -> bool:
    """Announces this replica for the first exchange that is not in flight yet.

    If the result is True, it sends messages from that exchange on.

    Args:
      num_in_flight: Number of exchanges in flight: their pseudo-gradients were
        measured already, but not exchanged yet.

    Returns:
      Whether this replica takes part. False if the others have already decided
      which messages they average in the exchange of its first message. Then it
      must first apply more of their exchanges, and try again.

    Raises:
      ReplicaStaleError: If the exchange of its first message was deleted.
    """
    if not self.announce(self.event + num_in_flight):
      return False
    self.first_own = self.event + num_in_flight
    return True

  def announce(self, event: int) -> bool:
    """Announces this replica for an event, so that the others wait for it.

    `event` is the number of an exchange. Returns whether this replica's message
    for the exchange may still count.

    Raises:
      ReplicaStaleError: If the event was deleted.
    """
    return self._ask("announce", event)

  def signs(self) -> np.ndarray:
    """Returns the random signs for the fingerprint of the next exchange.

    They are float32 [2^20] of +1 and -1, equal in all replicas. A fingerprint
    is a few random sums of the shared state, by which replicas compare it.
    """
    return random_signs(self.run, self.event)

  def exchange(
    self,
    kind: int,
    num_steps: int,
    take_fingerprint: Callable[[], Fingerprint],
  ) -> "ExchangeSession":
    """Begins the next exchange, and moves `event` on by one.

    Args:
      kind: Number of the fragment that is exchanged.
      num_steps: Number of inner steps behind this replica's message. 0 counts
        as 1, because the message may carry values that were held back.
      take_fingerprint: Function that returns the fingerprint (a few random
        sums) of the shared state that the exchange changes. Its random signs
        must be those that `signs` has returned before this call.

    Returns:
      The session of the exchange, which has sent nothing yet.

    Raises:
      ReplicaStaleError: If `announce` finds that the event was deleted.
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
    """Calls `Mailbox.exchange` for one message, and notes its time in `last_s`.

    The keyword `shared` is a function that returns arrays which the mailbox may
    have to read from several processes. All other arguments are passed on.
    """
    start_s = time.monotonic()
    exchanged = self._ask("exchange", *args, **kwargs)
    self.last_s = time.monotonic() - start_s
    return exchanged


class ExchangeSession:
  """Exchanges the messages of one event, turn by turn.

  An event is one exchange. It has one turn for each message that a replica
  sends in it; most codecs need one message.

  Attributes:
    is_counted: Whether this replica's messages were averaged in all turns so
      far.
    drops_all: Whether this replica must drop the fragment's values that it has
      sent or holds back. It must if the others refused its message (a late
      message is not refused), or if the message that counts is one that it sent
      before a restart.
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
    """Makes no request yet; `send` does.

    If not `attends`, this replica only reads. `kind` is the number of the
    fragment, and `state` the fingerprint (a few random sums) of the shared
    state before the event.
    """
    self._client = client
    self._event = event
    self._kind = kind
    self._attends = attends
    self._weight = weight
    self._state = state
    self._turn = 0
    self._wrong_shares: collections.Counter[str] = collections.Counter()
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
      arrays: The arrays of this replica's message. If this replica only reads,
        only their types and shapes matter.
      is_finite: Whether this replica's values are finite. If not, the message
        has the weight 0: it is left out of the mean, but nobody waits for it.
      shared: Returns the arrays of the state that all replicas share, which
        this replica may have to write into the store.
      tables: How the arrays are encoded. With this, each replica may average
        one slice of all messages. None: each averages whole messages.

    Returns:
      A tuple (arrays, weights, is_listed):

      - arrays: for each array of a message, the arrays of all K averaged
        messages, stacked: [K, ...].
      - weights: the weights of these messages, float32 [K], with the sum K.
      - is_listed: whether one of them is from this replica, bool [].

      If no message is averaged, K is 1, and arrays and weight are zeros. If the
      replicas have averaged slices, K is 1, the arrays are the mean, and the
      weight is 1.

    Raises:
      StoppedError: If the run was asked to stop and the store does not answer.
      Exception: Any error of `Mailbox.exchange`.
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
    # The others refused these values, or already have them from an earlier
    # message. So they must not be sent again.
    if exchanged.is_superseded or is_left_out:
      self.drops_all = True
    makers = [maker for _, _, maker in exchanged.wrong_shares]
    self._wrong_shares.update(makers)
    if turn == 0:
      self._client.settled.append(
        {
          "event": self._event,
          "members": [name for name, _, _ in exchanged.messages],
          "left_out": exchanged.left_out,
          "wrong_shares": self._wrong_shares,
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
