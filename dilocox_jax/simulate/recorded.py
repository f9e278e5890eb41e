"""A finished run as a script: the rounds and bytes that it really had.

Where rank and H adapt, the plan cannot foresee them; the run's own rows tell.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from dilocox_jax.plan.wire.collectives import Collective
from dilocox_jax.plan.wire.traffic import Traffic
from dilocox_jax.simulate.script import Compute, Launch, Op, Wait


@dataclasses.dataclass(frozen=True)
class RecordedRound:
  """One row of a run's metrics.

  Attributes:
    num_steps: Inner steps of the round.
    sent_bytes: What one replica put on the wire in it.
    is_local: Whether replicas went their own ways (not a warm start).
  """

  num_steps: int
  sent_bytes: int
  is_local: bool = True


def recorded_ops(
  rounds: Sequence[RecordedRound], traffic: Traffic
) -> Iterator[list[Op]]:
  """The ops of every round.

  A round sends by the operations of the plan, at the size that was recorded.
  With a delay they start when the round begins and are waited for after as
  many steps as hide them; otherwise they start after its last step. A warm
  start's bytes are spread over its steps.

  Args:
    rounds: In order.
    traffic: Of the run's config; one fragment.

  Raises:
    ValueError: If there are several fragments: their plan says more.
  """
  schedule = traffic.method.schedule
  if schedule.num_fragments > 1:
    raise ValueError(
      f"num_fragments={schedule.num_fragments}: only the plan knows when each "
      "of several fragments travels"
    )
  for number, each in enumerate(rounds):
    if not each.is_local:
      yield _data_parallel(number, each, traffic)
      continue
    launch = Launch(
      ("recorded", number, 0),
      _sized(traffic.exchange(0), each.sent_bytes, traffic.num_replicas),
    )
    if not each.sent_bytes:
      yield [Compute(each.num_steps)]
    elif not schedule.overlap_steps:
      yield [Compute(each.num_steps), launch, Wait(launch.key)]
    else:
      before = each.num_steps
      if (
        not schedule.is_whole_rounds
      ):  # Otherwise all of a round, however long.
        before = min(schedule.hiding_steps, before)
      after = each.num_steps - before
      rest = [Compute(after)] if after else []
      yield [launch, Compute(before), Wait(launch.key), *rest]


def _data_parallel(
  number: int, each: RecordedRound, traffic: Traffic
) -> list[Op]:
  ops: list[Op] = []
  part = each.sent_bytes / each.num_steps
  operations = _sized(traffic.gradient(), part, traffic.num_replicas)
  for step in range(each.num_steps):
    ops.append(Compute(1))
    if part:
      launch = Launch(("recorded", number, step), operations)
      ops += [launch, Wait(launch.key)]
  return ops


def _sized(
  planned: Sequence[Collective], sent_bytes: float | int, num_replicas: int
) -> tuple[Collective, ...]:
  """The planned operations, together as large as was recorded."""
  planned_bytes = sum(each.sent_bytes(num_replicas) for each in planned)
  scale = sent_bytes / (planned_bytes or 1)
  return tuple(
    Collective(each.kind, round(each.operand_bytes * scale)) for each in planned
  )
