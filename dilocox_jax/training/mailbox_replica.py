"""One replica of a run whose replicas are separate programs with a mailbox.

A mailbox, also called the store, is for example a folder in which the programs
leave messages for each other (docs/mailbox/how_to.md). This module builds the
exchange through the mailbox. It brings a replica that joins late to the step at
which the others are, and lets a replica that was absent skip the segments
(parts of the run, such as rounds) that it missed.
"""

import dataclasses
import hmac
import logging
import os
import pathlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.checks import flat, require
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.config.mailbox_terms import mailbox_rules, mailbox_terms
from dilocox_jax.distributed import coordinator_store, processes
from dilocox_jax.mailbox_protocol.agreement import ReplicaStaleError
from dilocox_jax.mailbox_protocol.costs import num_requests
from dilocox_jax.mailbox_protocol.roster import read_secret
from dilocox_jax.mailbox_protocol.store_size import check_store_bytes
from dilocox_jax.metrics.lines import JsonLines, plain
from dilocox_jax.metrics.recorder import MAILBOX_LOG
from dilocox_jax.metrics.run_logs import RunLog
from dilocox_jax.plan.collectives import AUTO, MAILBOX
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.rounds.exchanges import MailboxExchange, mailbox
from dilocox_jax.rounds.late_joiner import join, skip_windows
from dilocox_jax.rounds.mailbox_runtime import shared_leaves
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training.checkpoint import RefusedError
from dilocox_jax.training.overrides import Overrides
from dilocox_jax.trees import Tree


@dataclasses.dataclass(frozen=True)
class MailboxAddress:
  """Names the mailbox of a run, and the replica that uses it.

  Attributes:
    where: Folder or URL of the run, or an object with the methods of
      `mailbox_protocol.store.Store`.
    name: Name of this replica. Every replica of a run has a different name.
    secret: File of the secret that all replicas share, or the secret as bytes.
      If the replica has several processes, only process 0 needs the file.
  """

  where: Any
  name: str
  secret: bytes | str | os.PathLike[str]


def mailbox_config(
  config: RunConfig, address: MailboxAddress | None, overrides: Overrides
) -> RunConfig:
  """Returns the config with `exchange.collective` set to "mailbox".

  Raises:
    ValueError: If the address is None, if the user supplies an exchange, or if
      the config names a collective other than "auto" and "mailbox".
  """
  require(
    address is not None,
    f"exchange.collective={MAILBOX!r} needs a place where replicas meet: give "
    "--mailbox, or mailbox= of dilocox_jax.train",
  )
  require(
    overrides.exchange is None,
    "an exchange that is passed in does not go with replicas that meet in a "
    "store: drop it",
  )
  collective = config.exchange.collective
  require(
    collective in (AUTO, MAILBOX),
    f"exchange.collective={collective} needs replicas in one runtime: those "
    "that meet in a store can only average all messages, so leave it out",
  )
  exchange = dataclasses.replace(config.exchange, collective=MAILBOX)
  return dataclasses.replace(config, exchange=exchange)


def mailbox_exchange(
  config: RunConfig,
  address: MailboxAddress | None = None,
  text_digest: str = "",
) -> MailboxExchange:
  """Returns the exchange of a run whose replicas use a mailbox.

  The digest of the text must be equal in all replicas. Without an address, the
  result exchanges nothing, and serves only to read what a run has saved.
  """
  settings = config.exchange
  if address is None:
    address = MailboxAddress(None, name="", secret=b"")
  return mailbox(
    address.where,
    name=address.name,
    secret=address.secret,
    codec=to_plan.codec(config),
    step_weight=float(config.tokens_per_replica_step),
    text_digest=text_digest,
    rules=mailbox_rules(flat(config.to_mapping())),
    feedback=settings.feedback,
    against=settings.against,
    keep_unsent=settings.keep_unsent,
    seed=config.seed,
  )


class MailboxReplica:
  """The one replica of this program. Each other replica is another program.

  Attributes:
    config: Config of the run.
    name: Name of the replica.
  """

  def __init__(self, config: RunConfig, address: MailboxAddress):
    """Stores config and address; connects to nothing yet."""
    self.config = config
    self.name = address.name
    self._address = address
    self._last_members: list[str] = []
    self._num_requests = 0

  def with_exchange(self, overrides: Overrides, text_digest: str) -> Overrides:
    """Builds the exchange of the mailbox, and returns the overrides with it.

    The digest of the text must be equal in all replicas.
    """
    exchange = mailbox_exchange(self.config, self._address, text_digest)
    self._client = exchange.client
    # The config names the codec and its settings, so `enter` compares them.
    self._client.terms = {}
    return dataclasses.replace(overrides, exchange=exchange)

  def attach(
    self,
    rounds: Rounds,
    traffic: Traffic,
    params: Tree,
    optimizer: Tree,
    batch: Tree,
  ) -> None:
    """Checks and stores the programs of the run's rounds.

    The last three arguments are shapes and types: of the parameters, of the
    inner optimizer's state, and of a batch of one inner step.

    Raises:
      ValueError: In one of these cases:

        - The code of a step communicates over the replica axis.
        - The apply rule gives each replica outer parameters of its own.
        - `mailbox.store_bytes` is too low for this run.
    """
    _ = rounds.runtime  # This tells the client how the replica is divided.
    rounds.check_alone(params, optimizer, batch)
    fragments = rounds.states.abstract(params, optimizer).fragments
    snapshot_bytes = sum(
      leaf.size * leaf.dtype.itemsize
      for fragment in fragments
      for leaf in shared_leaves(rounds.outer, fragment)
    )
    # An exchange averages one fragment: one message of each replica.
    largest_message = max(
      traffic.exchange_bytes(number) for number in range(len(fragments))
    )
    check_store_bytes(
      self.config.mailbox.store_bytes,
      snapshot_bytes,
      event_bytes=self.config.mesh.num_replicas * largest_message,
    )
    self._rounds = rounds

  def request_stop(self) -> None:
    """Limits the time for which this program waits for the store from now on.

    If it has to wait for longer than `mailbox.grace_s` seconds plus the seconds
    that the last exchange took, `StoppedError` is raised where it waits.
    """
    self._client.request_stop()

  def check_processes(self) -> None:
    """Checks that all processes of this replica have the same mailbox.

    Place, name and secret must be equal. Only process 0 needs the secret.

    Raises:
      RefusedError: In every process, if two places, names or secrets differ or
        process 0 cannot read its secret.
    """
    address = self._address
    try:
      processes.check_equal(
        **{"--mailbox": str(address.where), "--replica": address.name}
      )
    except ValueError as error:
      raise RefusedError(str(error)) from error
    # A digest with a new key tells a listener nothing about the secret.
    key = processes.from_main(secrets.token_hex())
    digest, problem = _digest_of_secret(address.secret, key)
    found = coordinator_store.allgather([digest, problem])
    main_digest, main_problem = found[0]
    if main_problem:
      raise RefusedError(main_problem)
    # Only process 0 needs the secret, so the others may have "".
    for process, (other_digest, _) in enumerate(found):
      if other_digest not in ("", main_digest):
        raise RefusedError(
          f"process {process} has another secret than process 0: copy the file"
          " of process 0, or remove the other one"
        )

  def enter(
    self, values: Mapping[str, Any], override_names: Sequence[str]
  ) -> None:
    """Joins the run in the mailbox, or begins the run if no replica has yet.

    Raises:
      RefusedError: If the run has other settings than this replica, or if the
        name, the secret or the address of the mailbox is wrong.
      StoppedError: If this program was asked to stop, and the store does not
        answer in time.
    """
    terms = mailbox_terms(values, override_names)
    try:
      self._client.enter(terms.config)
    except ValueError as error:  # The message is one line.
      raise RefusedError(str(error)) from error

  def open(
    self,
    workdir: pathlib.Path,
    resume_step: int | None,
    log: RunLog | None,
  ) -> None:
    """Opens the file that records which replicas took part in each exchange.

    Only the main process has the file.

    Args:
      workdir: The run directory.
      resume_step: Inner step of the restored checkpoint; later rows of the file
        are deleted. None: the file starts empty.
      log: Gets every row of the file, too; None: there is no log.
    """
    self._log = log
    if not processes.is_main():
      return
    last_step = -1 if resume_step is None else resume_step
    self._rows = JsonLines(workdir / MAILBOX_LOG, last_step)

  @property
  def indices(self) -> Sequence[int]:
    """Index of this replica among the M replicas of the plan, in a list."""
    # The seat counts all replicas that have joined, also those that have left.
    return [self._client.seat % self.config.mesh.num_replicas]

  @property
  def is_behind(self) -> bool:
    """Whether a message of this replica is too late for the next exchange.

    If it is not, this property also tells the other replicas to wait for the
    message.

    Raises:
      ReplicaStaleError: If the other replicas have deleted the exchange.
    """
    return not self._client.announce(self._client.event)

  def join(self, state: RoundState, total_steps: int) -> RoundState:
    """Brings this replica from its first state to where the run is now.

    It begins again if the other replicas meanwhile delete what it reads.

    Args:
      state: The first state (`Rounds.init`). Its memory is reused.
      total_steps: Number of inner steps of the whole run.

    Returns:
      The state with which this replica continues. Its `step` says how many
      inner steps of the run count as done.

    Raises:
      StoppedError: If beginning again would not help.
    """
    self._client.writes_snapshots = True
    while True:
      try:
        return join(self._rounds, state, total_steps)
      except ReplicaStaleError as error:
        # The others went on meanwhile and deleted what this replica was
        # reading.
        logging.getLogger(__name__).info("beginning again: %s", error)

  def skip_segment(self, state: RoundState, segment: Segment) -> RoundState:
    """Goes through a segment's exchanges, but takes none of its inner steps.

    Returns the state after the segment (a part of the run, such as a round).

    Raises:
      ReplicaStaleError: If the replica must join the run again (`join`).
      StoppedError: If joining again would not help.
    """
    state = skip_windows(
      self._rounds, state, segment.windows, segment.num_steps
    )
    self.record(segment.stop)
    return state

  def end(self) -> None:
    """Stops writing snapshots, the states from which late joiners start."""
    self._client.writes_snapshots = False

  def get_state(self) -> dict[str, Any]:
    """Returns the state of the exchange for a checkpoint, as JSON values."""
    return self._client.get_state()

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Restores the state of the exchange that `get_state` returned.

    Raises:
      RefusedError: If the checkpoint belongs to another run than the store.
    """
    try:
      self._client.set_state(state)
    except ValueError as error:
      raise RefusedError(str(error)) from error

  def _write(self, row: dict[str, Any]) -> None:
    """Writes a row to the file of exchanges, and to the log if there is one."""
    self._rows.append(row)
    if self._log:
      self._log.write(plain(row))

  def record(self, step: int) -> str:
    """Records the exchanges that have ended since the last call.

    Args:
      step: Number of finished inner steps, which each row states.

    Returns:
      A note for the progress line: the number of replicas in the last exchange,
      and the mean number of requests to the store for each of these exchanges.
    """
    events = self._client.settled
    self._client.settled = []
    usage = self._client.usage  # Requests and bytes since the start.
    for event in events:
      if processes.is_main():
        self._write({"kind": "mailbox", "step": step, "usage": usage, **event})
      self._log_changed_members(event["event"], event["members"])
    total_requests = num_requests(usage)
    new_requests = total_requests - self._num_requests
    self._num_requests = total_requests
    requests_per_event = new_requests / max(len(events), 1)
    num_replicas = self.config.mesh.num_replicas
    return (
      f"{len(self._last_members)} of {num_replicas} here, "
      f"{requests_per_event:.0f} requests an event"
    )

  def _log_changed_members(self, event: int, members: list[str]) -> None:
    """Logs the replicas in an exchange, if the previous exchange had others."""
    if sorted(members) == self._last_members:
      return
    names = ", ".join(members) or "nobody"
    logging.getLogger(__name__).info("event %d has %s", event, names)
    self._last_members = sorted(members)


def _digest_of_secret(
  secret: bytes | str | os.PathLike[str], key: str
) -> tuple[str, str]:
  """Returns a secret's keyed digest and "", or "" and why it is unreadable."""
  if not isinstance(secret, bytes):
    try:
      secret = read_secret(secret)
    except ValueError as error:
      return "", str(error)
  return hmac.digest(bytes.fromhex(key), secret, "sha256").hex(), ""
