"""What several replicas would cost and give: gap, bytes, hours and loss.

An *offer* is a number of replicas with a method. All offers take the same
number of steps with the same number of sequences in a step, which the replicas
divide among themselves.
"""

import dataclasses
import math

from dilocox_jax.api import method_plans
from dilocox_jax.api.measured_gaps import share_of_more_steps
from dilocox_jax.api.simulation_setup import Options
from dilocox_jax.checks import flat
from dilocox_jax.config import RunConfig, from_mapping, to_plan
from dilocox_jax.config.run_gap import run_gap
from dilocox_jax.gap.expected import ExpectedGap
from dilocox_jax.gap.law import Estimate
from dilocox_jax.simulate.cluster_file import load_cluster
from experiments.gaps.tuned_pairs import global_batch

_COUNTED_ROUNDS = 3  # Rounds whose bytes are counted; the others send the same.


@dataclasses.dataclass(frozen=True)
class Hours:
  """Times and losses of an offer on a cluster.

  All replicas are computed to be equally fast, and a step with a part of the
  sequences takes that part of the time.

  Attributes:
    time_s: Time of the run (seconds, simulated).
    allreduce_s: Time of AllReduce on the same links (seconds, simulated).
    alone_share: The part of its own run that one cluster alone has done in
      `time_s`: 0.5 is half of it.
    loss: Expected loss at the end (nats a token); NaN: AllReduce's loss is not
      known.
    alone_loss: Loss of one cluster alone after the same time (nats a token,
      derived). It takes the better of two ways: fewer steps with B sequences,
      or all steps with fewer sequences.
  """

  time_s: float
  allreduce_s: float
  alone_share: float
  loss: Estimate
  alone_loss: float

  @property
  def verdict(self) -> str:
    """Whether the other clusters are worth it: "yes", "no" or "not known"."""
    if self.loss.high < self.alone_loss:
      return "yes"
    if self.loss.low > self.alone_loss:
      return "no"
    return "not known"


@dataclasses.dataclass(frozen=True)
class Offer:
  """A number of replicas with a method.

  Attributes:
    config: Config of the run.
    expected: Its expected gap.
    sent_bytes: Bytes that one replica sends in the run (derived).
    hours: Times and losses on a cluster; None: there is no cluster, or it has
      another number of sites.
  """

  config: RunConfig
  expected: ExpectedGap
  sent_bytes: int
  hours: Hours | None = None


def offer(
  config: RunConfig,
  method: str,
  num_replicas: int,
  gain: Estimate,
) -> Offer | None:
  """Returns an offer without hours.

  Args:
    config: Config of the planned run.
    method: Name of the method. That of the config keeps its fields.
    num_replicas: M.
    gain: s.

  Returns:
    The offer; None if M does not divide the number of sequences in a step, or
    if the method does not go with the config.
  """
  batch = global_batch(config)
  if batch % num_replicas:
    return None
  values = flat(config.to_mapping()) | {
    "mesh.num_replicas": num_replicas,
    "data.batch_size": batch // num_replicas,
    "membership.absences": "",
    "membership.inner_steps": "",
    "data.mix": "",
  }
  try:
    # A method of the planned run keeps its settings.
    divided = method_plans.of_method(from_mapping(values), method)
    expected = run_gap(divided, gain)
  except ValueError:
    return None
  if expected is None:
    return None
  return Offer(divided, expected, sent_bytes(divided))


def sent_bytes(config: RunConfig) -> int:
  """Returns the bytes that one replica sends in a run, flush included.

  All rounds in the middle of a run send the same. So only a few rounds are
  counted, and one of them stands for the others.

  Args:
    config: Config of the run.
  """
  interval = config.sync.named.schedule.sync_interval
  warm_start = config.sync.warm_start_steps
  rounds, rest = divmod(config.total_steps - warm_start, interval)
  num_skipped = max(rounds - _COUNTED_ROUNDS, 0)
  if not num_skipped:
    return _counted_bytes(config)
  short_steps = warm_start + _COUNTED_ROUNDS * interval + rest
  short = _counted_bytes(_with_steps(config, short_steps))
  longer = _counted_bytes(_with_steps(config, short_steps + interval))
  return short + num_skipped * (longer - short)


def _with_steps(config: RunConfig, steps: int) -> RunConfig:
  """Returns a config with another number of steps, for its bytes alone."""
  values = flat(config.to_mapping())
  values |= {"total_steps": steps, "inner.warmup_steps": 0}
  return from_mapping(values)


def _counted_bytes(config: RunConfig) -> int:
  """Returns the bytes that one replica sends in a run, segment by segment."""
  plan = to_plan.run_plan(config)
  traffic = to_plan.traffic(config)
  total = sum(map(traffic.segment_bytes, plan.segments()))
  return total + traffic.flush_bytes(plan.schedule_step(config.total_steps))


def sites_of(cluster: str) -> int | None:
  """Returns how many replicas a cluster places; None: any number.

  Args:
    cluster: Name of a preset or path of a cluster file.

  Raises:
    ValueError: One line, if there is no such cluster.
  """
  sizes = set()
  for num_replicas in (2, 3):
    try:
      sizes.add(load_cluster(cluster, num_replicas).num_replicas)
    except ValueError:
      continue
  if sizes == {2, 3}:
    return None
  return load_cluster(cluster).num_replicas


def with_hours(
  one: Offer, cluster: str, step_s: float | None, loss: float
) -> Offer:
  """Returns an offer with its times and losses on a cluster.

  Args:
    one: The offer.
    cluster: Name of a preset or path of a cluster file.
    step_s: Duration of an inner step of the offer (seconds); None: derived from
      its operations.
    loss: Loss of AllReduce with B sequences at the end (nats a token); NaN: not
      known.

  Raises:
    ValueError: One line, if the run does not fit on the cluster.
  """
  config = one.config
  plan = method_plans.plan_run(config, cluster, Options(step_s=step_s))
  num_replicas = config.mesh.num_replicas
  steps = config.total_steps
  time_s = steps * plan.rounds.step_s
  tokens = steps * config.tokens_per_replica_step * num_replicas
  # One cluster alone takes the sequences of all replicas, one after the other.
  alone_s = steps * plan.rounds.compute_s * num_replicas
  share = time_s / alone_s
  gap = one.expected
  return dataclasses.replace(
    one,
    hours=Hours(
      time_s=time_s,
      allreduce_s=tokens / plan.allreduce_tokens_per_s,
      alone_share=share,
      loss=Estimate(
        value=loss * (1 + gap.gap),
        low=loss * (1 + gap.low),
        high=loss * (1 + gap.high),
      ),
      alone_loss=loss * _alone_factor(share, gap.gain.value),
    ),
  )


def _alone_factor(share: float, gain: float) -> float:
  """Returns the loss of one cluster after a part of its run, over that of all.

  Args:
    share: The part of the run's work that is done.
    gain: s.
  """
  fewer_steps = share_of_more_steps(share)
  if share >= 1:
    return fewer_steps
  smaller_batch = (1 - gain) ** math.log2(share)
  return min(fewer_steps, smaller_batch)
