"""How gloo, a library for collectives on CPUs, sends messages for JAX.

The receiver of a message first sends a *notice* of a few bytes, for which the
sender waits. So a message takes a round trip besides its bytes. The functions
of this file compute how much longer collectives take for this reason.

An all-reduce goes round a ring of M processes. A message is a slice: one M-th
of the operand. Every slice is cut into segments of at most 1 MiB, and into at
least two segments. At any time, a process has asked for two segments. When a
segment has come, the process asks for the next segment but one:

    receiver   ask 1, ask 2                          ask 3
    line                     segment 1    segment 2               segment 3
    time       0             R/2          R/2 + s    R + s        3/2 R + s

Here s is the time of a segment on the line, and R is the round trip. So two
segments take R + s. If the line is slow (s > R), they take the time of their
bytes, 2 s. An all-gather does the same with the two halves of each operand.

Notices leave by the same line as segments and may have to wait there. If a
process asked for one segment at a time, the line would be busy for s of every
R + s seconds. So the notice finds the line busy with probability s / (R + s),
and so does the segment of the other request. Each then waits for half a
segment on average. With these two waits, two segments take

    R + s + 2 s / (R + s) * s / 2  =  2 s + R - W,   W = s R / (R + s)

This is 2 s if R is 0, and R + s on a very fast line. Two segments with no
further segments after them take 2 s + R, so W is the time by which two segments
overlap with the next two. If there are only two processes, one connection
carries notices and segments in both directions. There a notice always waits
behind the segment that is being sent, so nothing overlaps while R is below 2 s.

Example: an all-reduce of 128 MiB among M = 4 at 1 Gbit/s and R = 20 ms. The
payload has 956 Mbit/s, of which acknowledgements take 2 %. A slice has 32
segments of s = 8.97 ms. Two segments take 31.74 ms, and the 2 (M - 1) = 6
slices take 6 * 16 * 31.74 ms = 3.05 s. The bytes alone take 1.72 s.

In an all-to-all a process asks for all messages at once, so all of them
together wait for one round trip.

Source: gloo (gloo/allreduce.cc, gloo/allgather.cc, gloo/transport/tcp/pair.cc)
and XLA (xla/backends/cpu/collectives/gloo_communicator.cc). The waits on the
line follow from mean-value analysis: Reiser and Lavenberg, 1980.
"""

import math

import numpy as np

from dilocox_jax.simulate.transfer import Transport

AT_ONCE = 2  # Number of segments for which a process has asked at any time.
GATHERED_SEGMENTS = 2  # Number of segments of each operand of an all-gather.
# Factor by which a transfer takes longer if both directions carry payload. Each
# then also carries the acknowledgements of the other: a frame of 66 bytes for
# every second full frame of 1514 bytes (derived).
ACKNOWLEDGED = 1 + 66 / (2 * 1514)
# How much longer collectives take because two processes send in turn and not at
# the same time.
#
# Let process B be ready later than process A. Then B already has the notice of
# A and sends at once. The notice of B waits in the same socket behind this
# data. So A sends only when B has sent. With two processes an all-to-all takes
# twice as long for this reason, and an all-gather, which goes in two halves,
# 1.5 times as long. In an all-reduce a process asks before it sends, so both
# directions stay busy.
#
# With M processes, the two processes of a pair may be ready at the same time,
# and then they send at the same time. If a process has to wait for k of the
# M - 1 others, an all-to-all takes 1 + k / (M - 1) times as long. Processes
# that were ready within a millisecond took about as long as 2 of 3 (M = 4) and
# 4 of 7 (M = 8) give (measured, and rounded to these fractions:
# docs/results/links_processes.json). To measure your own machine, run
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
  """Returns the number of segments of an all-reduce's slice, at least two.

  Args:
    slice_bytes: Size of the slice (bytes).
    segment_bytes: Largest size of a segment (bytes).
  """
  return max(AT_ONCE, math.ceil(slice_bytes / segment_bytes))


def request_waits_s(
  segment_s: np.ndarray, rtt_s: np.ndarray, num_replicas: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns how much longer gloo's segments take because they are asked for.

  Two segments take a round trip R longer than their bytes, less the time W by
  which they overlap with the next two. So each segment takes (R - W) / 2
  longer. After the last two, which overlap with no others, W is added.

  Args:
    segment_s: Time of a segment on the line, s (seconds), [M].
    rtt_s: Round trip, R (seconds), [M].
    num_replicas: Number of replicas, M.

  Returns:
    The time that is added for each segment, and the time that is added after
    the last segment (seconds), [M] each.
  """
  sum_s = segment_s + rtt_s
  overlap_s = segment_s * rtt_s / np.where(sum_s > 0, sum_s, 1.0)
  if num_replicas == 2:
    # A notice waits behind the segment that is being sent the other way.
    overlap_s = np.where(rtt_s > AT_ONCE * segment_s, overlap_s, 0.0)
  wait_s = (rtt_s - overlap_s) / AT_ONCE
  return wait_s, overlap_s
