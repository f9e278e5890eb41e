"""What one TCP transfer gets out of its route, apart from who shares it.

Long links are slow for reasons that no capacity shows: a window that the
round trip exhausts, losses that halve it, a connection that starts anew after
a silence. They are three short formulas, kept here.
"""

import dataclasses
import math

from dilocox_jax.simulate.cluster import Route

SEGMENT_BYTES = 1448  # TCP payload of an Ethernet frame.
FIRST_WINDOW_SEGMENTS = 10  # RFC 6928.
# A connection that was silent for longer starts anew (RFC 5681, section 4.1);
# Linux takes at least this.
RETRANSMISSION_TIMEOUT_S = 0.2
RENO = math.sqrt(3 / 2)


@dataclasses.dataclass(frozen=True)
class Transport:
  """How messages are sent.

  Attributes:
    rtts_per_message: Round trips that a message costs beside its bytes; 1 if
      peers ask before they send, as JAX's CPU collectives do (recalled);
      0.5 is a bare message.
    starts_slowly: Whether the first message after a silence (longer than
      `RETRANSMISSION_TIMEOUT_S`) pays for TCP's slow start.
  """

  rtts_per_message: float = 1.0
  starts_slowly: bool = True


TCP = Transport()
IDEAL = Transport(rtts_per_message=0.5, starts_slowly=False)


def latency_s(transport: Transport, route: Route) -> float:
  """Seconds a message takes beside its bytes."""
  return transport.rtts_per_message * route.rtt_s


def limit_bytes_per_s(route: Route) -> float:
  """The most that a transfer gets on a route, however empty it is.

    min(k W / RTT, k C MSS / (RTT sqrt(p)))

  with k streams, window W, loss probability p, and C = sqrt(3 / 2).

  Source: Mathis et al., 1997, "The macroscopic behavior of the TCP congestion
  avoidance algorithm", equation 3. Newer congestion controls do better at small
  p: 67 instead of 35 Mbit/s at p = 1e-4 and 40 ms (recalled: CUBIC, 1 Gbit/s).

  Args:
    route: Round trip, loss, streams and window.
  """
  if not route.rtt_s:
    return math.inf
  limit = math.inf
  if route.window_bytes is not None:
    limit = route.streams * route.window_bytes / route.rtt_s
  if route.loss:
    per_stream = RENO * SEGMENT_BYTES / (route.rtt_s * math.sqrt(route.loss))
    limit = min(limit, route.streams * per_stream)
  return limit


def slow_start_s(
  transport: Transport,
  route: Route,
  rate_bytes_per_s: float,
  size_bytes: float,
) -> float:
  """Extra seconds of the first message after a silence.

  The rate doubles with every round trip, from ten segments a stream each, up
  to what the transfer gets later. Until it is there, after

    RTT log2(BDP / W),    W = 10 MSS k,

  it has sent (BDP - W) / ln 2 bytes; a smaller message takes RTT log2(1 + S ln
  2 / W) and never sees the full rate. What is returned is the time beyond
  S / rate. More bandwidth never makes the whole longer.

  Source: RFC 6928 for the first window; RFC 5681, section 3.1, for doubling.
  Differs: the doubling is continuous.

  Args:
    transport: Whether to count it at all.
    route: Round trip and streams.
    rate_bytes_per_s: What the transfer gets afterwards.
    size_bytes: Of the message.
  """
  if not transport.starts_slowly or not route.rtt_s:
    return 0.0
  window_bytes = FIRST_WINDOW_SEGMENTS * SEGMENT_BYTES * route.streams
  fullness = rate_bytes_per_s * route.rtt_s / window_bytes
  if fullness <= 1:
    return 0.0
  to_fill_bytes = window_bytes * (fullness - 1) / math.log(2)
  if size_bytes < to_fill_bytes:
    grown = 1 + size_bytes * math.log(2) / window_bytes
    return route.rtt_s * math.log2(grown) - size_bytes / rate_bytes_per_s
  return route.rtt_s * math.log2(fullness) - to_fill_bytes / rate_bytes_per_s
