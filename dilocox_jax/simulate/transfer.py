"""What TCP and communication libraries add to the times of transfers.

Lost packets limit the rate of a connection (`limit_bytes_per_s`), and a
connection that was idle starts slowly (`slow_start_s`).
"""

import dataclasses
import math

from dilocox_jax.simulate.cluster import Route

SEGMENT_BYTES = 1448  # TCP payload of an Ethernet frame.
FIRST_WINDOW_SEGMENTS = 10  # RFC 6928.
# A connection that was idle for longer than the retransmission timeout starts
# slowly again (RFC 5681, section 4.1). This is the smallest timeout of Linux.
RETRANSMISSION_TIMEOUT_S = 0.2
RENO = math.sqrt(3 / 2)  # The constant C of `limit_bytes_per_s`.


@dataclasses.dataclass(frozen=True)
class Transport:
  """How a communication library sends messages.

  Attributes:
    rtts_per_message: Round trips that a message costs besides its bytes: 0.5
      for the way there; 1 if the receiver first says that it is ready.
    pieces: Number of pieces of a message that are passed on one by one. With 1,
      a replica receives a whole message before it passes the message on.
    segment_bytes: Largest part of a message (bytes), if the receiver asks the
      sender for each part (`gloo`); None: the receiver does not ask.
    connections: Largest number of TCP connections between two replicas; None:
      only the cluster limits it (`Link.streams`).
    has_trees: Whether an all-reduce may go over trees instead of a ring.
    buffer_bytes: Bytes that may be under way at once by default. The simulator
      assumes that a user sets more where the line holds more. Infinity if no
      such limit is known.
    starts_slowly: Whether the first message after idle time (longer than
      `RETRANSMISSION_TIMEOUT_S`) pays for TCP's slow start.
    factors: Factors by which collectives take longer than the formulas say. An
      entry has the kind of a collective and pairs (number of replicas, factor)
      with ascending numbers. With M replicas, the first pair whose number is at
      least M counts; if there is none, the last pair counts. Kinds without an
      entry have the factor 1.
  """

  rtts_per_message: float = 0.5
  pieces: int = 1
  segment_bytes: int | None = None
  connections: int | None = None
  has_trees: bool = False
  buffer_bytes: float = math.inf
  starts_slowly: bool = True
  factors: tuple[tuple[str, tuple[tuple[int, float], ...]], ...] = ()

  def slowness(self, kind: str, num_replicas: int) -> float:
    """Returns the factor by which a collective takes longer (see `factors`).

    Args:
      kind: Kind of the collective, e.g. "all_reduce".
      num_replicas: Number of replicas, M.
    """
    by_count = dict(self.factors).get(kind, ((1, 1.0),))
    for count, factor in by_count:
      if num_replicas <= count:
        return factor
    return by_count[-1][1]


# NCCL's ring has two channels between nodes with one network card, and each
# channel passes on a chunk in two slices, so a message goes in four pieces. The
# number is derived from the source of NCCL (ALLREDUCE_CHUNKSTEPS is 4 of the 8
# steps of a channel's buffer, ALLREDUCE_SLICESTEPS 2), not measured.
#
# NCCL chooses between ring and trees by a table of latencies inside a data
# center (its tuning.cc), and does not know the delay of a link: from some MiB
# on it would take rings. The simulator takes the algorithm that is faster on
# the given links, as a user could with NCCL_ALGO. Otherwise other methods would
# look better only because NCCL chose poorly. The buffers of NCCL are not
# modeled: they are assumed to be large enough for the line. By default (4 MiB a
# channel, NCCL_BUFFSIZE) two channels of four slots of 512 KiB are under way.
NCCL = Transport(pieces=4, has_trees=True, buffer_bytes=4 * 2**20)
# Assumed to send as NCCL does. How TPUs send between slices is not published,
# and nothing was measured.
TPU = dataclasses.replace(NCCL, buffer_bytes=math.inf)


def limit_bytes_per_s(route: Route) -> float:
  """Returns the highest rate that losses allow a transfer (bytes/s).

  The rate of k TCP streams with loss probability p and payload MSS a packet is

    k C MSS / (RTT sqrt(p)),  C = sqrt(3 / 2)

  For p = 1e-4 and an RTT of 40 ms it is 35 Mbit/s for one stream. Without
  losses or delay it is infinity. The rates of the links are not counted.

  Source: Mathis et al., 1997, "The macroscopic behavior of the TCP congestion
  avoidance algorithm", equation 3.

  Args:
    route: Round trip, loss and streams.
  """
  if not route.rtt_s or not route.loss:
    return math.inf
  per_stream = RENO * SEGMENT_BYTES / (route.rtt_s * math.sqrt(route.loss))
  return route.streams * per_stream


def slow_start_s(
  transport: Transport, route: Route, rate_bytes_per_s: float, size_bytes: float
) -> float:
  """Returns the seconds that slow start adds to a message after idle time.

  The rate starts at W = 10 MSS k bytes a round trip: ten segments for each of k
  streams. It doubles with every round trip, up to the full rate, which is BDP =
  rate x RTT bytes a round trip. To reach the full rate takes

    RTT log2(BDP / W)

  seconds, in which (BDP - W) / ln 2 bytes are sent. A smaller message of S
  bytes never gets the full rate, and takes RTT log2(1 + S ln 2 / W) seconds.
  The result is the time beyond S / rate. It is 0 if W is at least BDP, or if
  the transport has no slow start.

  Example: RTT 40 ms, one stream, 125 MB/s (1 Gbit/s). W = 14.5 kB, BDP = 5 MB,
  so the rate doubles log2(345) = 8.4 times, which takes 337 ms. In that time
  7.2 MB are sent, which would take 58 ms at the full rate: 280 ms are lost.

  Source: RFC 6928 for the first window; RFC 5681, section 3.1, for doubling.
  Differs: the doubling is continuous.

  Args:
    transport: Transport of the message.
    route: Round trip and streams.
    rate_bytes_per_s: Rate that the transfer gets after slow start (bytes/s).
    size_bytes: Size of the message (bytes).
  """
  if not transport.starts_slowly or not route.rtt_s:
    return 0.0
  window_bytes = FIRST_WINDOW_SEGMENTS * SEGMENT_BYTES * route.streams
  fullness = rate_bytes_per_s * route.rtt_s / window_bytes  # BDP / W.
  if fullness <= 1:
    return 0.0
  to_fill_bytes = window_bytes * (fullness - 1) / math.log(2)
  if size_bytes < to_fill_bytes:
    grown = 1 + size_bytes * math.log(2) / window_bytes
    return route.rtt_s * math.log2(grown) - size_bytes / rate_bytes_per_s
  return route.rtt_s * math.log2(fullness) - to_fill_bytes / rate_bytes_per_s
