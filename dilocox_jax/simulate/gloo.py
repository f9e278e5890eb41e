"""What gloo does in a collective, and how long its requests take.

The receiver of a message asks for it: it sends a notice of a few bytes, and the
sender sends when the notice has come. So a message takes a round trip besides
its bytes.

An all-reduce is a ring. Every slice is cut into segments of at most 1 MiB, and
into two at least. A process has asked for two segments at any time. When one
has come, the process adds it up, sends it on and asks for the next but one:

    receiver   ask 1, ask 2                          ask 3
    line                     segment 1    segment 2               segment 3
    time       0             R/2          R/2 + s    R + s        3/2 R + s

Here s is the time of a segment on the line, and R is the round trip. So two
segments take R + s. On a slow line they take their bytes, 2 s. This does not
depend on the number of replicas. A faster line helps little once 2 MiB take
less than a round trip. An all-gather does the same with the two halves of each
operand.

Notices leave by the same line as segments. A line that serves one request alone
is busy for s of every R + s seconds. So the notice and the segment of the other
request each find the line busy with probability s / (R + s), and then wait for
half a segment on average. With these two waits, two segments take

    R + s + 2 s / (R + s) * s / 2  =  2 s + R - W,   W = s R / (R + s)

This is 2 s without a delay, and R + s on a very fast line. Two segments alone
take 2 s + R, so W is the time by which they overlap with the next two. Between
two processes notices and segments share one connection. There a notice always
stands behind what is being sent, so nothing overlaps while R is below 2 s.

Example: 128 MiB among M = 4 at 1 Gbit/s (956 Mbit/s of payload, of which 2 %
are acknowledgements) and R = 20 ms. A slice has 32 segments of s = 9.0 ms. Two
of them take 31.7 ms, and the 2 (M - 1) slices 6 * 16 * 31.7 ms = 3.05 s. The
bytes alone take 1.72 s.

In an all-to-all a process asks for all messages at once, so together they wait
for one round trip.

Source: gloo (gloo/allreduce.cc, gloo/allgather.cc, gloo/transport/tcp/pair.cc)
and XLA (xla/backends/cpu/collectives/gloo_communicator.cc). The waits on the
line follow from mean-value analysis: Reiser and Lavenberg, 1980.
"""

import math

import numpy as np

from dilocox_jax.simulate.transfer import Transport

AT_ONCE = 2  # Segments for which a process has asked.
GATHERED_SEGMENTS = 2  # Of each operand of an all-gather.
# Where both directions carry payload, each also carries acknowledgements of the
# other: a frame of 66 bytes for every second segment of TCP (derived).
ACKNOWLEDGED = 1 + 66 / (2 * 1514)
# A process that is ready later than another one already has the other's notice,
# and sends at once. Its own notice stands in the same socket behind what it
# sends, so the two processes send in turn. Between two processes an all-to-all
# thus takes twice as long, and an all-gather, which goes in two halves, 1.5
# times. An all-reduce asks before it sends and keeps both directions busy.
# Among M processes the two of a pair may be ready at the same time, and then
# send at once. If a replica has to wait for k of the M - 1 others, an
# all-to-all takes 1 + k / (M - 1) times as long. Processes that were ready
# within a millisecond took about what 2 of 3 and 4 of 7 give (measured, and
# rounded to these: docs/results/links_processes.json). To measure your machine:
# `experiments.tools.links --cases=calibrate`.
GLOO = Transport(
  rtts_per_message=1.0,
  segment_bytes=2**20,
  connections=1,
  factors=(
    ("all_reduce", ((2, ACKNOWLEDGED),)),
    ("all_gather", ((2, 1.5), (4, ACKNOWLEDGED))),
    ("all_to_all", ((2, 2.0), (4, 1 + 2 / 3), (8, 1 + 4 / 7))),
  ),
)


def num_segments(slice_bytes: float, segment_bytes: float) -> int:
  """Returns the number of segments of a slice of an all-reduce.

  Args:
    slice_bytes: Size of the slice (bytes).
    segment_bytes: Largest size of a segment (bytes).
  """
  return max(AT_ONCE, math.ceil(slice_bytes / segment_bytes))


def request_waits_s(
  segment_s: np.ndarray, rtt_s: np.ndarray, num_replicas: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns what the requests for segments add to their time on the line.

  Args:
    segment_s: Time of a segment on the line (seconds), [M].
    rtt_s: Round trip (seconds), [M].
    num_replicas: Number of replicas, M.

  Returns:
    Time that each segment adds while others follow, and time that the last ones
    add besides (seconds), [M] each.
  """
  both_s = segment_s + rtt_s
  overlap_s = segment_s * rtt_s / np.where(both_s > 0, both_s, 1.0)
  if num_replicas == 2:
    overlap_s = np.where(rtt_s > AT_ONCE * segment_s, overlap_s, 0.0)
  return (rtt_s - overlap_s) / AT_ONCE, overlap_s
