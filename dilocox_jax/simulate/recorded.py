"""A finished run as a script, with the rounds and bytes that it had.

If rank and H adapt, the plan cannot know them in advance. The rows that the
run has written do.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.script import Compute, Launch, Op, Wait, exchange_ops


@dataclasses.dataclass(frozen=True)
class RecordedRound:
  """One row of a run's metrics.

  Attributes:
    num_steps: Inner steps of the round.
    sent_bytes: Bytes that one replica put on the wire in the round.
    is_local: Whether it is a local round, not a part of a warm start.
  """

  num_steps: int
  sent_bytes: int
  is_local: bool = True


def recorded_ops(
  rounds: Sequence[RecordedRound], traffic: Traffic
) -> Iterator[list[Op]]:
  """Yields the ops of every round.

  A round sends the collectives of the plan, with the bytes that were recorded.
  If the exchange is delayed, it is launched when the round begins and waited
  for after the steps that hide it. Otherwise it is launched after the last
  step. The bytes of a warm start are spread evenly over its steps.

  Args:
    rounds: Rows of the run, in order.
    traffic: Traffic of the run's config, with one fragment.
  """
  schedule = traffic.method.schedule
  for number, row in enumerate(rounds):
    if not row.is_local:
      yield _data_parallel(number, row, traffic)
      continue
    key = ("recorded", number, 0)
    sent = _sized(traffic.exchange(0), row.sent_bytes, traffic.num_replicas)
    exchange = functools.partial(exchange_ops, key, sent, traffic.num_replicas)
    if not row.sent_bytes:
      yield [Compute(row.num_steps)]
    elif not schedule.overlap_steps:
      yield [Compute(row.num_steps), *exchange(Compute(0))]
    else:
      # A delay of whole rounds hides behind all steps of a round, however many
      # the adaptive controller has chosen.
      before = row.num_steps
      if not schedule.is_whole_rounds:
        before = min(schedule.hiding_steps, before)
      after = row.num_steps - before
      rest = [Compute(after)] if after else []
      yield [*exchange(Compute(before)), *rest]


def _data_parallel(
  number: int, row: RecordedRound, traffic: Traffic
) -> list[Op]:
  ops: list[Op] = []
  part = row.sent_bytes / row.num_steps
  operations = _sized(traffic.gradient(), part, traffic.num_replicas)
  share = float(traffic.method.exchanged == "gradient")
  for step in range(row.num_steps):
    ops.append(Compute(1))
    if part:
      key = ("recorded", number, step, 0)
      launch = Launch(key, operations, codec_share=share)
      ops += [launch, Wait(key, codec_share=share)]
  return ops


def _sized(
  planned: Sequence[Collective], sent_bytes: float | int, num_replicas: int
) -> tuple[Collective, ...]:
  """Returns the planned collectives, scaled to the bytes recorded."""
  planned_bytes = sum(each.sent_bytes(num_replicas) for each in planned)
  scale = sent_bytes / (planned_bytes or 1)
  return tuple(
    dataclasses.replace(each, operand_bytes=round(each.operand_bytes * scale))
    for each in planned
  )
