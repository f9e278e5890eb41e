"""Makes the mean of messages in shares: a reduce-scatter and an all-gather.

Messages are cut into slices. A replica reads one slice of each message,
averages the slices, and writes the result: its *share* of the mean. Then it
reads the shares of the others. So a replica reads about two messages in all,
however many replicas there are. `reference.shares` says how a share is
computed.

A turn is one message of each replica in an event (exchange). The requests of a
replica in a turn, one after the other:

    create the message
    read one slice of each of the other messages
    propose the manifest (list of messages), and decide on it
    create the share, and read whether the event was deleted
    read the other shares, and create the residual of the share

The *residual* is what the codec loses of a share. Normally it is added to the
next mean of the same slice, whichever replica makes that share
(`agreement.Memory.residual_event` has the exceptions).

If a share is not there after the grace time, every replica that waits makes it:
all machines compute the same bytes from the same messages, and only one can
create the object. In about one of eight turns a replica computes another's
share again, to find machines that compute wrong results.
"""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.mailbox_protocol.buffers import Buffer, Data
from dilocox_jax.mailbox_protocol.manifest import Manifest
from dilocox_jax.mailbox_protocol.messages import (
  FEW,
  Inbox,
  arrays_in,
  message_path,
  raw_bytes,
  residual_path,
  share_path,
  shares_folder,
  wrong_share_path,
)
from dilocox_jax.mailbox_protocol.signer import Signer, signed_bytes
from dilocox_jax.mailbox_protocol.sliced import SlicedInbox
from dilocox_jax.reference.shares import (
  NORM_TOLERANCE,
  Table,
  make_share,
  norm_of_values,
  residual_cuts,
  residual_values,
)

_LOG = logging.getLogger(__name__)
# The header of a share: digest of the manifest, and one byte that is 1 if a
# residual was added to the mean.
_DIGEST_BYTES = 32
HEADER_BYTES = _DIGEST_BYTES + 1
# In one of so many turns, drawn at random, another replica computes one share
# again to check it.
CHECKED_TURNS = 8
# Two shares that are computed from the same messages may differ by this part of
# their norm, for rounding in float32. Fingerprints allow the same.
_SHARE_TOLERANCE = 63 * 2.0**-24


class Check(NamedTuple):
  """Says which share of a turn's mean is computed again, and by whom.

  A share is the mean of one slice of all messages.

  Attributes:
    event: Number of the event (exchange).
    turn: Number of the message within the event, from 0.
    number: Number of the share.
    checker: Name of the replica that computes it again.
  """

  event: int
  turn: int
  number: int
  checker: str

  @property
  def path(self) -> str:
    """Path of the object which says that the share is wrong."""
    return wrong_share_path(self.event, self.turn, self.number)


class Residual(NamedTuple):
  """The loss of encoding a share, as the share's maker remembers it.

  A share is the mean of one slice of all messages.

  Attributes:
    event: Number of the event (exchange) in which the share was made.
    values: What was lost, float32 [R, width] for each table of the message. A
      table is a group of rows of one width, and R of its rows are in the slice.
  """

  event: int
  values: list[np.ndarray]


class Share(NamedTuple):
  """The mean of one slice of all messages, which this replica read or made.

  Attributes:
    data: The signed object, as it is in the store.
    tables: The encoded values of the share, a table for each group of rows.
    has_residual: Whether a residual (loss of encoding) of an earlier share was
      added to the mean before it was encoded.
    loss: The new residual, as tables of encoded rows; [] if shares have none.
      None: this replica has read the share, so it does not know the residual.
  """

  data: Data
  tables: list[Table]
  has_residual: bool
  loss: list[Table] | None = None


@dataclasses.dataclass
class Shares:
  """Makes and reads shares: the means of single slices of a turn's messages.

  In a turn of an event (exchange), each replica sends one message. Usually each
  replica makes one share, and reads the others. A replica makes none for an
  event before the snapshot with which it began (`Inbox.is_past`). Some methods
  return functions that make requests, so that the caller can make the requests
  at the same time.

  Attributes:
    store: The folder or bucket, as a `RetryingStore`.
    signer: Signs and verifies the objects of the run.
    inbox: The messages of the turn that this replica has so far.
    agreed: The manifest of the turn, which lists at least one message.
    name: Name of this replica.
    remembered: Residuals (losses of encoding) of shares that this replica has
      made, by (number of the fragment, turn, number of slices, number of the
      share).
    residual_event: The event (exchange) whose residuals are added to this mean;
      -1: none.
    held: The shares that this replica has, by number.
  """

  store: Any
  signer: Signer
  inbox: SlicedInbox
  agreed: Manifest
  name: str
  remembered: dict[tuple[int, int, int, int], Residual]
  residual_event: int = -1
  held: dict[int, Share] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    """Derives what all shares of the turn have in common."""
    self._digest = bytes.fromhex(self.agreed.digest())
    self._largest_norm = max(each.norm for each in self.agreed.listed)
    self._unwritten_residuals: list[int] = []
    self._refused: set[int] = set()

  @property
  def num_slices(self) -> int:
    """Number of shares, S."""
    return self.inbox.num_slices

  def missing(self) -> list[int]:
    """Returns the numbers of the shares that this replica does not have."""
    return [n for n in range(self.num_slices) if n not in self.held]

  def maker(self, number: int) -> str:
    """Returns the name of the replica that has to make a share of the mean.

    Number s of the replicas that are expected to send makes share s if the
    manifest lists its message. Else another replica whose message is listed
    makes it. After the grace time, every replica that waits for the share makes
    it.
    """
    expected = self.inbox.expected
    names = self.agreed.names
    if number < len(expected) and expected[number] in names:
      return expected[number]
    return names[number % len(names)]

  def own(self) -> list[int]:
    """Returns the numbers of the missing shares that this replica must make."""
    return [n for n in self.missing() if self.maker(n) == self.name]

  def _missing_of_others(self) -> list[int]:
    """Returns the numbers of the missing shares that others must make."""
    return [n for n in self.missing() if self.maker(n) != self.name]

  def reads_for_comparison(self) -> list[Callable[[], None]]:
    """Returns functions that read a slice of the first listed message.

    A replica whose message is not listed needs this slice: it compares its
    state with the fingerprint (a few random sums) there. The list is empty for
    all other replicas, and if the slice was read before.
    """
    if self.name in self.agreed.names:
      return []
    first = self.agreed.listed[0].replica
    return self.inbox.read_slices([first], self.inbox.first_slice)

  def first_calls(self, is_late: bool) -> list[Callable[[], Any]]:
    """Returns the functions to call first in a try to get all shares.

    For each share that this replica must make, they read the slices that are
    missing. If no slice is missing, they make the share. They also write
    residuals (losses of encoding). Call the functions of `last_calls` after
    them.

    Args:
      is_late: Whether the grace time (`MailboxRules.grace_s`) is over. Then
        they also look for the missing shares of other replicas, and read the
        slices for them.
    """
    calls = self.writes_of_residuals()
    if self.inbox.is_past:
      # This replica does not know which residuals belong to the shares.
      return calls
    calls += self._making(self.own())
    if is_late:
      for number in self._missing_of_others():
        calls.append(functools.partial(self.read, number))
        calls += self.reads_of_slices(number)
    return calls

  def last_calls(self, is_late: bool, lists: bool) -> list[Callable[[], Any]]:
    """Returns the functions to call last in a try to get all shares.

    For each share that this replica must make, they make the share if all its
    slices were read. Else they read the missing slices. They also write
    residuals (losses of encoding), and read the shares of other replicas.

    Args:
      is_late: Whether the grace time (`MailboxRules.grace_s`) is over. Then
        they make the missing shares of other replicas, too.
      lists: Whether to list the shares' folder first if more than 3 (`FEW`)
        are to be read. Then only shares in the listing are read.
    """
    made_here: list[int] = []
    if not self.inbox.is_past:
      made_here = self.missing() if is_late else self.own()
    calls = self._making(made_here) + self.writes_of_residuals()
    others = [number for number in self.missing() if number not in made_here]
    if lists and len(others) > FEW:
      others = self._in_store(others)
    for number in others:
      calls.append(functools.partial(self.read, number))
    return calls

  def _making(self, numbers: Sequence[int]) -> list[Callable[[], Any]]:
    """Returns functions that make shares of the mean, or read their slices.

    A share is made only if all its slices were read before.
    """
    calls: list[Callable[[], Any]] = []
    for number in numbers:
      reads = self.reads_of_slices(number)
      if reads:
        calls += reads
      else:
        calls.append(functools.partial(self.create, number))
    return calls

  def _in_store(self, numbers: Sequence[int]) -> list[int]:
    """Lists the shares' folder, and returns which of the shares are there."""
    event = self.inbox.event
    turn = self.inbox.turn
    there = self.store.sizes(shares_folder(event, turn))
    return [n for n in numbers if share_path(event, turn, n) in there]

  def reads_of_slices(self, number: int) -> list[Callable[[], None]]:
    """Returns functions that read the slices which a share still needs.

    The manifest lists one message of each sender. If this replica has read a
    slice of another message of a sender, this slice is forgotten first, so that
    it is read again.
    """
    for listed in self.agreed.listed:
      section = self.inbox.slice(listed.replica, number)
      if section is not None and section.digest != listed.digest:
        self.inbox.forget(listed.replica, number)
    return self.inbox.read_slices(self.agreed.names, number)

  def has_slices(self, number: int) -> bool:
    """Returns whether this replica has all slices for a share of the mean."""
    return not self.reads_of_slices(number)

  def create(self, number: int) -> None:
    """Computes a share, and writes it to the store.

    The share is also added to `held`. If another replica has written a valid
    share before, the share of that replica counts, and is added. If the norm of
    the computed share is too large, it is neither written nor added.

    Args:
      number: Number of the share, whose slices were all read.
    """
    share = self._made(number, self._residual_before(number))
    if self._is_too_large(number, share.tables):
      # This replica computes wrong results. Another one will make the share.
      return
    path = share_path(self.inbox.event, self.inbox.turn, number)
    if not self.store.create(path, share.data):
      self.read(number)
      stored = self.held.get(number)
      if stored is not None:
        # If the stored share is equal, this replica knows its residual, too.
        if _is_same(stored.tables, share.tables):
          self._keep(number, share)
        return
      # The object there was refused: it is not signed or damaged, it is of
      # another manifest, or its norm is too large. So nobody has applied it.
      self.store.put(path, share.data)
    self._keep(number, share)

  def _keep(self, number: int, share: Share) -> None:
    """Adds a share that this replica has made to `held`.

    Its residual (loss of encoding) is remembered, and written later
    (`writes_of_residuals`).
    """
    self.held[number] = share
    if not share.loss:
      return
    self._unwritten_residuals.append(number)
    self.remembered[self._key(number)] = Residual(
      event=self.inbox.event,
      values=residual_values(self.inbox.tables, share.loss),
    )

  def _key(self, number: int) -> tuple[int, int, int, int]:
    """Returns the key of a share in `remembered`."""
    inbox = self.inbox
    return inbox.kind, inbox.turn, self.num_slices, number

  def writes_of_residuals(self) -> list[Callable[[], Any]]:
    """Returns functions that write residuals of shares into the store.

    They write the losses of encoding the shares that this replica has made
    since the last call.
    """
    calls: list[Callable[[], Any]] = []
    for number in self._unwritten_residuals:
      loss = self.held[number].loss
      path = residual_path(self.inbox.event, self.inbox.turn, number)
      assert loss is not None, "only residuals of shares made here are written"
      data = self.signer.sign(path, *_matrices(loss))
      calls.append(functools.partial(self.store.create, path, data))
    self._unwritten_residuals = []
    return calls

  def read(self, number: int) -> None:
    """Reads a share, and adds it to `held` if it is valid.

    A valid share is signed, was made for the manifest `agreed` (the list of the
    averaged messages), and has no larger norm than the largest message.
    """
    path = share_path(self.inbox.event, self.inbox.turn, number)
    size = HEADER_BYTES + self.inbox.cuts.num_bytes(number)
    data = self.store.get(path, signed_bytes(size))
    content = self.signer.verify(path, data)
    if data is None or content is None or len(content) != size:
      return
    if content[:_DIGEST_BYTES] != self._digest:
      return  # It was made for another manifest, which nobody may follow.
    tables = self.inbox.cuts.slice_in(content[HEADER_BYTES:], number)
    if self._is_too_large(number, tables):
      return
    self.held[number] = Share(data, tables, bool(content[_DIGEST_BYTES]))

  def _is_too_large(self, number: int, tables: Sequence[Table]) -> bool:
    """Returns whether a share of the mean is refused because of its norm.

    A mean cannot have a larger norm than the largest of its messages. A refused
    share is logged once.
    """
    norm = self.inbox.tables.norm(tables)
    if norm <= self._largest_norm * (1 + NORM_TOLERANCE):
      return False
    if number not in self._refused:
      self._refused.add(number)
      _LOG.warning(
        "event %d: share %d of the mean, which %s should make, is refused: its"
        " norm %.3g is above %.3g, that of the largest message; it is made"
        " again",
        self.inbox.event,
        number,
        self.maker(number),
        norm,
        self._largest_norm,
      )
    return True

  def mean(self) -> list[np.ndarray]:
    """Joins the shares to the arrays of the mean. All must be in `held`."""
    slices = [self.held[number].tables for number in range(self.num_slices)]
    matrices = self.inbox.cuts.join(slices)
    arrays = []
    for matrix, like in zip(matrices, self.inbox.like, strict=True):
      kind = like.dtype, like.shape
      arrays += arrays_in(raw_bytes(matrix), [kind])
    return arrays

  def objects(self) -> dict[str, Data]:
    """Returns the shares and listed messages that this replica has, by path.

    They are the signed objects, as in the store. A message is left out if this
    replica has only slices of it. A waiting replica writes these objects again
    if they have vanished.
    """
    event = self.inbox.event
    turn = self.inbox.turn
    objects: dict[str, Data] = {}
    for number, share in self.held.items():
      objects[share_path(event, turn, number)] = share.data
    for listed in self.agreed.listed:
      message = self.inbox.held.get(listed.replica)
      if message is None or not message.is_whole:
        continue
      if message.digest == listed.digest:
        objects[message_path(event, turn, listed.replica)] = message.data
    return objects

  def check(self, run: str) -> Check | None:
    """Returns which share is computed again in this turn; None if none is.

    In about one of eight (`CHECKED_TURNS`) turns, one replica checks one share
    of another. A hash of the run and the turn chooses the replica and share.
    """
    names = self.agreed.names
    text = f"{run} {self.inbox.event} {self.inbox.turn}".encode()
    draw = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    if draw % CHECKED_TURNS or len(names) < 2:
      return None
    # What is left of the hash chooses the share, and then the replica.
    draw //= CHECKED_TURNS
    number = draw % self.num_slices
    draw //= self.num_slices
    others = [name for name in names if name != self.maker(number)]
    return Check(
      event=self.inbox.event,
      turn=self.inbox.turn,
      number=number,
      checker=others[draw % len(others)],
    )

  def is_made_here(self, number: int) -> bool:
    """Returns whether this replica has computed a share in `held` itself."""
    return self.held[number].loss is not None

  def difference(self, number: int) -> str:
    """Computes a share again, and returns how the share in `held` differs.

    Returns:
      The difference, such as "by 1.0e-03 of its norm". The result is "" if the
      shares are equal up to rounding. It is also "" if something that is needed
      cannot be read: a slice, or the residual (loss of encoding an earlier
      share) that was added to the mean.
    """
    self.store.at_once(self.reads_of_slices(number))
    share = self.held[number]
    residual = self._residual_before(number) if share.has_residual else None
    is_residual_known = residual is not None or not share.has_residual
    if not (self.has_slices(number) and is_residual_known):
      return ""
    again = self._made(number, residual)
    expected = self.inbox.tables.decode(again.tables)
    actual = self.inbox.tables.decode(share.tables)
    gap = norm_of_values([a - b for a, b in zip(actual, expected, strict=True)])
    norm = max(norm_of_values(expected), norm_of_values(actual))
    if gap <= _SHARE_TOLERANCE * norm:
      return ""
    return f"by {gap / norm:.1e} of its norm"

  def _made(self, number: int, residual: list[np.ndarray] | None) -> Share:
    """Computes a share without writing it.

    All its slices were read before. The residual, float32 [R, width] for each
    table, is added to the mean if it is given.
    """
    slices = []
    for name in self.agreed.names:
      section = self.inbox.slice(name, number)
      assert section is not None, "the slices of a share are read before"
      slices.append(section.tables)
    tables, loss = make_share(
      self.inbox.tables,
      slices,
      weights=[listed.weight for listed in self.agreed.listed],
      norms=[listed.norm for listed in self.agreed.listed],
      residual=residual,
    )
    has_residual = residual is not None
    path = share_path(self.inbox.event, self.inbox.turn, number)
    data = self.signer.sign(
      path, self._digest, bytes([has_residual]), *_matrices(tables)
    )
    return Share(data, tables, has_residual, loss)

  def _residual_before(self, number: int) -> list[np.ndarray] | None:
    """Returns the residual to add to a share; None if none is known.

    It is what encoding lost in the share with this number at `residual_event`,
    as float32 [R, width] for each table.
    """
    tables = self.inbox.tables
    if self.residual_event < 0 or not tables.has_residual:
      return None
    remembered = self.remembered.get(self._key(number))
    if remembered is not None and remembered.event == self.residual_event:
      return remembered.values
    cuts = residual_cuts(tables, self.inbox.cuts)
    size = cuts.num_bytes(number)
    path = residual_path(self.residual_event, self.inbox.turn, number)
    data = self.store.get(path, signed_bytes(size))
    content = self.signer.verify(path, data)
    if content is None or len(content) != size:
      return None
    return residual_values(tables, cuts.slice_in(content, number))


def event_bytes(inbox: Inbox, num_messages: int) -> int:
  """Returns the bytes that a turn's messages, shares and residuals take.

  Shares are the means of single slices of the messages, and residuals are what
  encoding the shares lost. There are none if messages are not cut into slices.
  `inbox` gives their sizes; `num_messages` is the number of messages.
  """
  size = num_messages * inbox.num_bytes
  if not isinstance(inbox, SlicedInbox):
    return size
  residuals = residual_cuts(inbox.tables, inbox.cuts)
  for number in range(inbox.num_slices):
    size += signed_bytes(HEADER_BYTES + inbox.cuts.num_bytes(number))
    if inbox.tables.has_residual:
      size += signed_bytes(residuals.num_bytes(number))
  return size


def _matrices(tables: Iterable[Table]) -> list[Buffer]:
  """Returns the bytes of each array in some tables of encoded rows."""
  return [raw_bytes(matrix) for table in tables for matrix in table]


def _is_same(one: Sequence[Table], other: Sequence[Table]) -> bool:
  """Returns whether two shares have equal encoded rows."""
  return all(
    np.array_equal(a, b)
    for first, second in zip(one, other, strict=True)
    for a, b in zip(first, second, strict=True)
  )
