"""Lets replicas join a run: its secret, its rules and the list of its replicas.

The object `run.json` says what is trained and by which rules. The first replica
writes it. A later replica whose values differ from these is refused.

A replica that joins a run, or comes back to it, takes the next free *seat*: an
object that is created once, and holds the number of the event (exchange) from
which the replica takes part. A replica that did not send its message in time is
*away*: nobody waits for it until it comes back. The *roster* says who has
joined and who is away.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dilocox_jax.checks import check_limits, flat, limited, require
from dilocox_jax.files import replaced
from dilocox_jax.mailbox_protocol.buffers import Buffer
from dilocox_jax.mailbox_protocol.messages import (
  MANIFESTS,
  RUN,
  RUN_COPY,
  SEATS,
  seat_path,
)
from dilocox_jax.mailbox_protocol.signer import JSON_BYTES, Signer
from dilocox_jax.mailbox_protocol.store import get_all
from dilocox_jax.plan.collectives import MAILBOX_SHARES

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
# Replicas with different versions of the protocol cannot train together. The
# version grows with each change of what is written in a store, of what replicas
# conclude from it, or of what they compute from the same messages. All versions
# sign and read `run.json` in the same way. So a replica that is refused can say
# which version it has and which one the run has.
PROTOCOL_VERSION = 4
_FIRST_PROTOCOL_VERSION = 1  # In this version, `run.json` named no version.
_SECRET_BYTES = 32
_BEFORE_FIRST_EVENT = -1
# A seat that exists and cannot be read yet is asked for again after pauses that
# double. Together they take 13 s. Network folders may remember for some seconds
# that an object is missing, but not as long as this.
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 12.0
# Longest pause (seconds) after other replicas took the seat that this one
# wanted.
_LONGEST_CROWD_PAUSE_S = 3.0


class RunMismatchError(ValueError):
  """Raised if a replica must not join the run that is in a store.

  For example, its config differs. The message is one line.
  """


@dataclasses.dataclass(frozen=True)
class MailboxRules:
  """Rules of a run, equal in all replicas.

  They say, for example, when the list of averaged messages is decided.

  Attributes:
    replicas: Number of replicas that the first event (exchange) waits for, up
      to the grace time.
    quorum: Least number of messages that must be there before the list is
      decided. If each replica sends two messages in an event, one after the
      other, this holds only for the first messages.
    grace_s: Grace time: seconds that a replica waits for the messages of the
      others, from when it has sent its own.
    snapshot_every: Number of events after which the next snapshot (copy of the
      shared state) is due. It is due later if a replica has not yet sent as
      many bytes as a snapshot has. It is due sooner if `store_bytes` is low.
    store_bytes: Largest number of bytes of all objects in the store; None: a
      limit that follows from the size of a snapshot and the number of replicas,
      at least 1 GB (`mailbox_protocol.store_size`).
    max_norm_ratio: A message is left out if its norm is more than this many
      times the usual norm, e.g. the median norm of the event's messages (see
      `mailbox_protocol.manifest`).
    full_weight_ratio: A message loses weight in the mean if its norm is more
      than this many times the usual norm.
    shares: When each replica averages one slice of all messages, instead of all
      slices. "off": never. "on": if at least two replicas are expected to send,
      and messages are encoded by `Float`, `Int` or `E3M0` (after another codec,
      if there is one). "auto": if at least four replicas are expected to send,
      and messages are encoded by `Float`, or by `Int` with 4 or 8 bits.
  """

  replicas: int = limited(2, at_least=1)
  quorum: int = limited(1, at_least=1)
  grace_s: float = limited(60.0, above=0, below=math.inf)
  snapshot_every: int = limited(64, at_least=1)
  store_bytes: int | None = limited(None, at_least=1)
  max_norm_ratio: float = limited(5.0, above=1, below=math.inf)
  full_weight_ratio: float = limited(1.0, at_least=1, below=math.inf)
  shares: str = limited("auto", choices=MAILBOX_SHARES)

  def __post_init__(self):
    """Raises ValueError if a field is outside its limits."""
    check_limits(self, "mailbox.")


def write_secret(path: str | os.PathLike[str]) -> None:
  """Writes a new random secret to a file that only its owner may read.

  The file has one line of 64 hexadecimal digits, and the mode 0600. Its folder
  is made if it is missing.

  Raises:
    ValueError: If the file exists. The message is one line.
    OSError: If the file cannot be written.
  """
  path = pathlib.Path(path)
  if os.path.lexists(path):
    raise ValueError(f"{path} exists: a run would lose its secret; delete it")
  path.parent.mkdir(parents=True, exist_ok=True)
  with replaced(path) as file:
    os.fchmod(file.fileno(), stat.S_IRUSR | stat.S_IWUSR)
    file.write(secrets.token_hex(_SECRET_BYTES).encode() + b"\n")


def read_secret(path: str | os.PathLike[str]) -> bytes:
  """Returns the secret in a file, without the spaces around it.

  Raises:
    ValueError: If the file cannot be read, if its mode gives other users any
      right, or if it has fewer than 64 characters. The message is one line.
  """
  try:
    with open(path, "rb") as file:
      mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
      text = file.read(2**16).strip()
  except OSError as error:
    raise ValueError(
      f"the secret {path} cannot be read ({error.strerror}): copy it from "
      "another replica's machine, or make one with `python -m "
      "experiments.make_secret`"
    ) from error
  if mode & (stat.S_IRWXG | stat.S_IRWXO):
    raise ValueError(
      f"{path} may be read by others (mode {mode:04o}): chmod 600 {path}"
    )
  if len(text) < 2 * _SECRET_BYTES:
    raise ValueError(
      f"{path} holds no secret of {2 * _SECRET_BYTES} characters or more: make"
      " one with `python -m experiments.make_secret`"
    )
  return text


def run_terms(
  config: Mapping[str, Any], text_digest: str, rules: MailboxRules
) -> dict[str, Any]:
  """Returns the values that must be equal in all replicas, for `run.json`.

  Args:
    config: All settings that a run's result depends on, as nested mappings with
      values of JSON.
    text_digest: Digest of the training text; "" if none is compared.
    rules: The rules of the run.

  Returns:
    A dict with "protocol" (the version), "config", "rules" and "text".
  """
  return {
    "protocol": PROTOCOL_VERSION,
    "config": dict(config),
    "rules": dataclasses.asdict(rules),
    "text": text_digest,
  }


class RunEntry(NamedTuple):
  """A run that a replica has joined.

  Attributes:
    run: Random identifier of the run. Signatures of its objects depend on it.
    objects: Contents of `run.json` and its copy, by path.
  """

  run: str
  objects: dict[str, bytes]


def join_run(
  store: Any,
  secret: bytes,
  terms: Mapping[str, Any],
  *,
  where: str,
) -> RunEntry:
  """Joins the run that is in a store, or begins one.

  `run.json` and a copy of it say what the run is. If one is lost or damaged, it
  is written again from the other.

  Args:
    store: The folder or bucket, as a `RetryingStore`.
    secret: The secret that all replicas share.
    terms: The values that must be equal in all replicas (`run_terms`).
    where: Folder or URL of the store, for error messages.

  Raises:
    RunMismatchError: If `terms` or the secret differ from those of the run, or
      if it is not clear which run the store holds.
  """
  signer = Signer(secret, "")
  stored = _read_run(store)
  if all(data is None for data in stored.values()):
    stored = _begin_run(store, signer, terms, where)
  records = {
    path: signer.verify_json(path, data) for path, data in stored.items()
  }
  known = [record for record in records.values() if record is not None]
  if not known:
    raise RunMismatchError(
      f"{RUN} at {where} is not signed with this secret: take the secret of"
      " that run, or another place for a new run"
    )
  record = known[0]
  # If `run.json` and its copy are of two runs, only one of the runs is in use.
  if any(other["id"] != record["id"] for other in known):
    record = _record_in_use(store, secret, known, where)
  objects = {path: signer.sign_json(path, record) for path in (RUN_COPY, RUN)}
  for path, data in objects.items():
    if records[path] == record:
      continue
    # The object is missing, damaged or of the other run: write it again.
    is_created = stored[path] is None and store.create(path, data)
    if not is_created:
      store.put(path, data)
  _compare_terms(record, terms, where)
  return RunEntry(str(record["id"]), objects)


def _begin_run(
  store: Any, signer: Signer, terms: Mapping[str, Any], where: str
) -> dict[str, Buffer | None]:
  """Creates the copy of `run.json`, unless another replica is faster.

  Returns the bytes of `run.json` and of its copy, as `_read_run` does.

  Raises:
    RunMismatchError: If the store has manifests (lists of messages), so that
      its `run.json` must be lost.
  """
  if store.sizes(MANIFESTS):
    raise RunMismatchError(
      f"{where} holds events of a run, and its {RUN} and {RUN_COPY} are gone:"
      " put one of them back, or take another place for a new run"
    )
  record = {**terms, "id": secrets.token_hex(16)}
  # `join_run` then writes `run.json` from the copy that is in the store.
  store.create(RUN_COPY, signer.sign_json(RUN_COPY, record))
  return _read_run(store)


def _read_run(store: Any) -> dict[str, Buffer | None]:
  """Returns the bytes of `run.json` and of its copy, by path; None: missing."""
  paths = (RUN_COPY, RUN)
  contents = get_all(store, dict.fromkeys(paths, JSON_BYTES))
  return dict(zip(paths, contents, strict=True))


def _record_in_use(
  store: Any, secret: bytes, records: Sequence[dict[str, Any]], where: str
) -> dict[str, Any]:
  """Returns the one of two different contents of `run.json` that is in use.

  It is the one whose run has signed manifests (lists of messages) in the store.

  Raises:
    RunMismatchError: If none or several of the runs have manifests there.
  """
  paths = list(store.sizes(MANIFESTS))
  # One manifest is enough. The newest three are tried, in case one is damaged.
  in_use = []
  for record in records:
    signer = Signer(secret, str(record["id"]))
    if any(
      signer.verify_json(path, store.get(path, JSON_BYTES))
      for path in paths[-3:]
    ):
      in_use.append(record)
  if len(in_use) != 1:
    raise RunMismatchError(
      f"{RUN} and {RUN_COPY} at {where} are of two runs with one secret: delete"
      " the wrong one, or take another place for a new run"
    )
  return in_use[0]


def _compare_terms(
  record: Mapping[str, Any], terms: Mapping[str, Any], where: str
) -> None:
  """Compares the values of a run with those of this replica, field by field.

  Raises:
    RunMismatchError: For the first field that differs. The message names it.
  """
  version = record.get("protocol", _FIRST_PROTOCOL_VERSION)
  if version != terms["protocol"]:
    raise RunMismatchError(
      f"this replica has version {terms['protocol']} of the mailbox's protocol,"
      f" and the run at {where} has version {version}: install a release of"
      " dilocox_jax with that version, or begin a new run in another place"
    )
  theirs = flat({key: value for key, value in record.items() if key != "id"})
  # As `run.json` would have them: tuples become lists, for example.
  ours = flat(json.loads(json.dumps(terms)))
  for field in dict.fromkeys([*ours, *theirs]):
    if ours.get(field) != theirs.get(field):
      raise RunMismatchError(
        f"{field} is {_short(ours.get(field))} here and"
        f" {_short(theirs.get(field))} in the run at {where}: take the run's"
        " value"
      )


def _short(value: Any) -> str:
  """Returns a value as text for an error message; of a digest, 8 characters."""
  if isinstance(value, str) and len(value) == 64:
    return f"{value[:8]}..."
  return repr(value)


def checked_name(replica: str) -> str:
  """Returns the name of a replica if it is valid.

  Raises:
    ValueError: If the name is not 1 to 32 of the characters a-z, 0-9, "_" and
      "-", or does not begin with a letter or a digit. The message is one line.
  """
  require(
    bool(_NAME.fullmatch(replica)),
    f"replica={replica!r} must be 1 to 32 of the characters a-z, 0-9, _ and -,"
    " and begin with a letter or a digit",
  )
  return replica


@dataclasses.dataclass(frozen=True)
class Roster:
  """The replicas that take part in a run after an event (exchange).

  A replica creates a seat (an object that names it) when it joins the run, and
  another one each time that it comes back.

  Attributes:
    seats: Names of all replicas that ever took a seat, in the order of their
      first seats.
    away: Replicas that nobody waits for, each with the event that it missed; -1
      for a newcomer whose first event has not come yet.
    later: Number of all seats but the first one of each replica.
    since: Replicas whose newest seat names an event that has not come yet, each
      with that event.
  """

  seats: tuple[str, ...] = ()
  away: dict[str, int] = dataclasses.field(default_factory=dict)
  later: int = 0
  since: dict[str, int] = dataclasses.field(default_factory=dict)

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "Roster":
    """Builds a roster from the fields that `dataclasses.asdict` returns."""
    return cls(
      seats=tuple(values["seats"]),
      away=dict(values["away"]),
      later=int(values["later"]),
      since=dict(values["since"]),
    )

  @property
  def num_seats(self) -> int:
    """Number of seats that were taken so far."""
    return len(self.seats) + self.later

  def names(self) -> list[str]:
    """Returns the names of all replicas, in the order in which they joined."""
    return list(self.seats)

  def expected(self) -> list[str]:
    """Returns the names of the replicas whose messages the others wait for.

    They are the replicas that are not away, in the order in which they joined.
    """
    return [name for name in self.names() if name not in self.away]

  def renewed(
    self, event: int, taken: Iterable[Mapping[str, Any]] = ()
  ) -> "Roster":
    """Returns a copy to which newcomers and returning replicas are added.

    Args:
      event: Number of the next event (exchange). A replica whose seat names
        this event or an earlier one is expected from now on. Exception: it
        stays away if it has already missed the event that its seat names, or a
        later one.
      taken: Contents of the new seats, from number `num_seats` on: the
        replica's "name", and the event "since" which it takes part.
    """
    seats = list(self.seats)
    away = dict(self.away)
    later = self.later
    since = dict(self.since)
    for seat in taken:
      name = str(seat["name"])
      if name in seats:
        later += 1
      else:
        # A newcomer is away until the event that its seat names.
        seats.append(name)
        away[name] = _BEFORE_FIRST_EVENT
      since[name] = int(seat["since"])
    for name, first_event in list(since.items()):
      if first_event > event:
        continue
      del since[name]
      if name in away and away[name] < first_event:
        del away[name]
    return Roster(tuple(seats), away, later, since)

  def after(self, event: int, present: Iterable[str]) -> "Roster":
    """Returns the roster (who takes part) after an event.

    Args:
      event: Number of the event (exchange).
      present: Names of the replicas that sent a message. They are no longer
        away. Expected replicas that are not among them are away from now on.
    """
    present = set(present)
    away = {
      name: missed_event
      for name, missed_event in self.away.items()
      if name not in present
    }
    for name in self.expected():
      if name not in present:
        away[name] = event
    return dataclasses.replace(self, away=away)


class Seats:
  """Reads the seats of all replicas, and takes seats for one replica.

  A seat is an object in the store with the name of a replica and the event
  (exchange) from which it takes part. Seats are numbered in the order in which
  they are taken.

  Attributes:
    index: Place of this replica in `Roster.seats`; None if not known yet.
  """

  def __init__(self, store: Any, signer: Signer, name: str):
    """Makes no request yet. `store` is a `RetryingStore`."""
    self._store = store
    self._signer = signer
    self._name = name
    self._since: int | None = None
    self._number = 0  # Number of the seat that this replica has taken last.
    self.index: int | None = None

  def read(self, number: int) -> dict[str, Any] | None:
    """Reads seat `number`, the entry of a replica that takes part.

    Returns:
      The replica's "name", and the event (exchange) "since" which it takes
      part; None if the seat is free or damaged.
    """
    path = seat_path(number)
    return self._signer.verify_json(path, self._store.get(path, JSON_BYTES))

  def read_from(self, number: int) -> list[dict[str, Any]]:
    """Returns the contents of consecutive seats, as `read` returns them.

    The list begins with seat `number`, and ends before the first seat that is
    free or damaged.
    """
    holders = self._read_all(range(number, self._first_free(number)))
    if None in holders:
      holders = holders[: holders.index(None)]
    return [holder for holder in holders if holder is not None]

  def announce(self, event: int, roster: Roster) -> None:
    """Takes a seat, so that the others expect this replica from `event` on.

    `event` is the number of an exchange. Nothing happens if the seat that this
    replica took last was for the same event. `roster` has the replicas that
    take part after the event before.
    """
    if self._since == event:
      return
    self._since = event
    self._number = self._take_seat(roster)
    if self._name in roster.seats:
      self.index = roster.seats.index(self._name)
    else:
      self.index = self._number - roster.later

  def look_after(self, roster: Roster) -> None:
    """Writes this replica's seat again if it is missing or damaged.

    If seats before it are missing or damaged, this replica takes them, too,
    because a gap hides all seats after it. Seats that `roster` counts are not
    looked at.
    """
    if self._since is None:
      return
    # The replica that held a missing seat may have died.
    numbers = range(roster.num_seats, self._number + 1)
    for number, holder in zip(numbers, self._read_all(numbers), strict=True):
      if holder is None:
        path = seat_path(number)
        data = self._signer.sign_json(path, self._record())
        if not self._store.create(path, data) and self.read(number) is None:
          self._store.put(path, data)  # The object there is damaged.

  def _record(self) -> dict[str, Any]:
    """Returns the content of this replica's seat: its name and first event."""
    return {"name": self._name, "since": self._since}

  def _read_all(self, numbers: Iterable[int]) -> list[dict[str, Any] | None]:
    """Reads the seats with some numbers at the same time, as `read` does."""
    return self._store.at_once(
      [functools.partial(self.read, number) for number in numbers]
    )

  def _first_free(self, number: int) -> int:
    """Returns the smallest number, from `number` on, that no seat has."""
    paths = self._store.sizes(SEATS)
    while seat_path(number) in paths:
      number += 1
    return number

  def _take_seat(self, roster: Roster) -> int:
    """Takes the first free seat for this replica, and returns its number.

    After a restart, this replica takes its earlier seat again if that is the
    next one after the seats that `roster` counts. If `roster` counts no seat,
    this replica takes a new one.
    """
    number = roster.num_seats
    if not number:  # No event is settled, but others may have taken seats.
      number = self._first_free(0)
    num_lost = 0  # How often another replica was faster.
    wait = _FIRST_PAUSE_S
    while True:
      path = seat_path(number)
      data = self._signer.sign_json(path, self._record())
      if self._store.create(path, data):
        return number
      stored = self._store.get(path, JSON_BYTES)
      if stored == data:
        # This replica wrote it before a restart, or the answer to its request
        # was lost.
        return number
      holder = self._signer.verify_json(path, stored)
      if holder is not None and holder["name"] != self._name:
        num_lost += 1
        self._store.pause(self._pause_after(num_lost))
        number = self._first_free(number + 1)
      elif stored is None and wait < _LONGEST_PAUSE_S:
        # The seat was deleted meanwhile, or it cannot be read yet.
        self._store.pause(wait)
        wait = 2 * wait
      else:
        # The seat was damaged, or this replica wrote it before a restart.
        self._store.put(path, data)
        return number

  def _pause_after(self, num_lost: int) -> float:
    """Returns the seconds to wait after others took `num_lost` wanted seats."""
    # The pauses of replicas that join together differ, and grow, so that these
    # replicas do not collide again and again.
    text = f"{self._name} {num_lost}"
    fraction = hashlib.sha256(text.encode()).digest()[0] / 256
    return fraction * min(_FIRST_PAUSE_S * 2**num_lost, _LONGEST_CROWD_PAUSE_S)
