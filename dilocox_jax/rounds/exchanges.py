"""Two ways to exchange: in one JAX runtime, or through a folder or a bucket.

If all replicas are in one JAX runtime, an aggregator averages over the axis of
the replicas (`LocalExchange`). If each replica has a runtime of its own, they
exchange through a folder or a bucket (`MailboxExchange`,
docs/mailbox/how_to.md).
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.aggregators.mailbox_mean import MailboxMean
from dilocox_jax.aggregators.message_groups import is_in_rows
from dilocox_jax.checks import require, within_limits
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.named import named_codec
from dilocox_jax.distributed.replicas import (
  ALONE_AXIS,
  REPLICA_AXIS,
  Replicas,
)
from dilocox_jax.mailbox_protocol.client import MailboxClient
from dilocox_jax.mailbox_protocol.mailbox import Mailbox
from dilocox_jax.mailbox_protocol.replica_processes import (
  OneProcess,
  ReplicaProcesses,
)
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.collectives import MAILBOX
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.rounds.cluster_processes import ClusterProcesses
from dilocox_jax.rounds.exchange_thread import InThread
from dilocox_jax.rounds.in_program import InProgram
from dilocox_jax.rounds.mailbox_runtime import MailboxRuntime
from dilocox_jax.rounds.runtime import Runtime


@dataclasses.dataclass(frozen=True, eq=False)
class LocalExchange:
  """The exchange of replicas that are all in one JAX runtime.

  Attributes:
    aggregator: Averages over the axis of the replicas.
    in_thread: Whether a second thread dispatches exchanges beside inner steps
      (`InThread`).
    axis_name: Axis over which replicas are mapped.
  """

  aggregator: Aggregator
  in_thread: bool = False
  axis_name: str = REPLICA_AXIS

  def enter(self, method: Method, num_replicas: int) -> None:
    """Does nothing, because no other JAX runtime belongs to the run."""

  def make_runtime(self, outer: OuterStep, replicas: Replicas) -> Runtime:
    """Returns the object that decides how exchanges run.

    It is an `InThread` (a second thread) if `in_thread` is True, and otherwise
    an `InProgram` (exchanges are parts of other compiled programs).
    """
    if self.in_thread:
      return InThread(outer, replicas)
    return InProgram(replicas)


@dataclasses.dataclass(frozen=True, eq=False)
class MailboxExchange:
  """The exchange of one replica with replicas in other JAX runtimes.

  The replicas exchange through a mailbox: a folder or a bucket.

  Attributes:
    aggregator: Averages the messages that the mailbox brings.
    client: Client of the mailbox. It also counts the exchanges that are done.
    is_in_rows: Whether a message stays the same if a replica is divided among
      its devices in another way.
    axis_name: Axis over which the one replica is mapped.
  """

  aggregator: Aggregator
  client: MailboxClient
  is_in_rows: bool
  axis_name: str = ALONE_AXIS

  def enter(self, method: Method, num_replicas: int) -> None:
    """Joins the run in the folder or bucket, or starts it as the first replica.

    Args:
      method: Schedule and rule, which must be equal in all replicas.
      num_replicas: Number of replicas in this JAX runtime; must be 1.

    Raises:
      ValueError: In one of these cases:

        - `num_replicas` is not 1.
        - The run was started with other values of settings that must be equal
          in all replicas.
        - The name, the secret or the store cannot be used.
      StoppedError: If this program was asked to stop, and the store does not
        answer in time.
    """
    require(
      num_replicas == 1,
      f"num_replicas={num_replicas} must be 1 with dilocox_jax.mailbox, in "
      "which each replica is a program of its own",
    )
    self.client.enter({"method": dataclasses.asdict(method)})

  def make_runtime(self, outer: OuterStep, replicas: Replicas) -> Runtime:
    """Returns the object that sends and receives the mailbox's messages.

    Call it before `enter`. With some codecs, either all replicas or none must
    be divided among several devices, and `enter` then compares this.

    Raises:
      ValueError: If the apply rule gives each replica outer parameters of its
        own.
    """
    # With e.g. top-k, a divided replica encodes each leaf by itself, but one on
    # a single device encodes several leaves together. Their messages do not
    # match, so this term refuses a run that mixes both.
    if replicas.is_divided and not self.is_in_rows:
      self.client.terms_of_devices = {"groups_of_leaves": "one leaf each"}
    return MailboxRuntime(outer, replicas, self.client)


def mailbox(
  where: Any,
  *,
  name: str,
  secret: bytes | str | os.PathLike[str],
  codec: Codec | str = "float32",
  step_weight: float = 1.0,
  config: Mapping[str, Any] | None = None,
  text_digest: str = "",
  rules: MailboxRules = MailboxRules(),  # noqa: B008 - it is frozen
  feedback: float = 0.0,
  against: str = "own",
  keep_unsent: bool = False,
  seed: int = 0,
  collective: str = MAILBOX,
) -> MailboxExchange:
  """Makes the exchange of replicas that meet in a folder or a bucket.

  Pass it to `dilocox_jax.make_rounds` in programs that have one replica each,
  on machines anywhere. `make_rounds` joins the run.

  Wire: a message has, in addition to the arrays of the codec,

  - 120 bytes of an authentication code and a header,
  - 32 bytes of a code for each MiB or part of one, and
  - 136 bytes of random sums for each block of the fragment's outer state. A
    block is up to 2^20 values of one array. By the sums, replicas find out
    whether their states still agree.

  Messages may be cut into slices, so that each replica averages one slice
  (`MailboxRules.shares`). Then each slice has, in addition to its part of the
  arrays, only 160 bytes and the random sums.

  Args:
    where: Folder or URL of the run, or an object with the methods of
      `mailbox_protocol.store.Store`.
    name: Name of this replica. No other replica of the run may have it.
    secret: Path of the file with the secret that all replicas share, or the
      secret as bytes.
    codec: Codec that encodes the pseudo-gradients, or the codec as text, e.g.
      "int(bits=4)".
    step_weight: Weight of one inner step of this replica in the mean, e.g. its
      number of sequences. A message's weight is `step_weight` times the number
      of inner steps since the fragment (the part of the parameters in the
      message) was measured last.
    config: All other settings that must be equal in all replicas, e.g. the
      inner learning rate, as nested mappings of JSON. None: no others.
    text_digest: Digest of the training text, which must be equal in all
      replicas; "" if there is none.
    rules: Rules of the exchange, such as how long to wait for a replica.
    feedback: Fraction of the residual that is added to the next message, 0
      (none) to 1 (all). The residual is what the codec lost. If a message came
      too late, the residual is the whole message.
    against: What is subtracted from this replica's values to get the residual:
      "own" (these values as they were sent) or "mean" (the mean over all
      replicas).
    keep_unsent: Whether the residual stays in the replica's parameters, so that
      the next pseudo-gradient contains it. It needs `feedback` = 0.
    seed: Seed of random masks and of the first low-rank factors.
    collective: Must be "mailbox": no other collective reaches other programs.

  Returns:
    The exchange. Nothing is read or written before `make_rounds` gets it.

  Raises:
    ValueError: If an argument does not fit; the message names it. `where`,
      `name` and `secret` are only checked by `make_rounds`.
  """
  within_limits("step_weight", step_weight, above=0)
  codec_name = str(codec)
  if isinstance(codec, str):
    codec = named_codec(codec)
  require(
    collective == MAILBOX,
    f"collective={collective!r} needs replicas in one runtime: those that meet "
    "in a store can only average all messages, so leave it out",
  )
  open_mailbox = functools.partial(
    Mailbox,
    where,
    name=name,
    secret=secret,
    text_digest=text_digest,
    rules=rules,
  )
  settings = {
    "codec": codec_name,
    "feedback": feedback,
    "against": against,
    "keep_unsent": keep_unsent,
    "seed": seed,
  }
  aggregator = exchange(
    codec,
    feedback=feedback,
    against=against,
    keep_unsent=keep_unsent,
    seed=seed,
    collective=MailboxMean(),
  )
  client = MailboxClient(
    open_mailbox=open_mailbox,
    terms={**(config or {}), "exchange": settings},
    step_weight=step_weight,
    keeps=bool(feedback or keep_unsent),
    grace_s=rules.grace_s,
    name=name,
    processes=_replica_processes(),
  )
  # A thread carries out the whole exchange beside all inner steps of a window,
  # so the steps are not divided among its messages.
  return MailboxExchange(
    aggregator=aggregator._replace(stretch_ends=None),
    client=client,
    is_in_rows=is_in_rows(codec.encoder),
  )


def _replica_processes() -> ReplicaProcesses:
  """Returns the object with which a replica's processes share a mailbox.

  All processes of this JAX runtime must call its methods together.
  """
  if jax.process_count() == 1:
    return OneProcess()
  return ClusterProcesses()
