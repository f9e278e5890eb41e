"""Computes what a planned run would cost with several replicas.

The costs are the gap (loss divided by AllReduce's, minus 1), bytes, time and
loss. An *offer* is the run with a given method and number of replicas, together
with its costs. All offers for a run take the same number of steps, and the same
number of sequences in a step, which the replicas divide among themselves.
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


@dataclasses.dataclass(frozen=True)
class Hours:
  """Times and losses of a planned run whose replicas are clusters.

  Replicas are assumed to be equally fast. A step with half of the sequences is
  assumed to take half of the time, and so on.

  Attributes:
    time_s: Time of the run (seconds, simulated).
    allreduce_s: Time of AllReduce on the same links (seconds, simulated).
    alone_share: Share of the run's work that one cluster alone would do in
      `time_s`; above 1 if it would do more.
    loss: Expected loss at the end, with its range (nats a token); all NaN if
      AllReduce's loss is not known.
    alone_loss: Loss of one cluster alone after the same time (nats a token,
      derived). If the time is too short for the whole run, the cluster takes
      fewer steps, or fewer sequences in a step, whichever is better. If there
      is time for more, the cluster takes more steps. NaN if AllReduce's loss is
      not known.
  """

  time_s: float
  allreduce_s: float
  alone_share: float
  loss: Estimate
  alone_loss: float

  @property
  def verdict(self) -> str:
    """Whether the run ends with a lower loss than one cluster after equal time.

    The answer is "yes" or "no". It is "not known" if `alone_loss` lies within
    the range of `loss`, or if AllReduce's loss is not known.
    """
    if self.loss.high < self.alone_loss:
      return "yes"
    if self.loss.low > self.alone_loss:
      return "no"
    return "not known"


@dataclasses.dataclass(frozen=True)
class Offer:
  """A planned run with a given method and number of replicas, and its costs.

  Attributes:
    config: Config of the run.
    expected: Expected gap: the loss divided by AllReduce's, minus 1.
    sent_bytes: Bytes that one replica sends in the run (derived).
    hours: Times and losses on a cluster; None: there is no cluster, or the
      cluster places another number of replicas.
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
  """Computes the gap and the bytes of a run with a method and M replicas.

  Args:
    config: Config of the planned run. The M replicas divide its sequences.
      Settings of single replicas (absences, inner steps, `data.mix`) are
      dropped.
    method: Name of the method. The config's own method keeps its settings. Any
      other one gets its usual settings, with the config's H if H is set there.
      With every method, H and the codec's rank do not adapt.
    num_replicas: Number of replicas, M.
    gain: s, the share by which AllReduce's loss falls if its batch doubles from
      half of the sequences in a step to all of them.

  Returns:
    The run and its costs, without `hours`. None if M is 1 or does not divide
    the sequences in a step, if the method averages gradients, or if the method
    does not go with the config.
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
  """Returns the bytes that one replica sends in a run.

  They include exchanges that are still due after the last inner step.
  """
  return to_plan.traffic(config).run_bytes(to_plan.run_plan(config))


def sites_of(cluster: str) -> int | None:
  """Returns how many replicas a cluster has; None if it takes any number.

  Args:
    cluster: Name of a preset or path of a cluster file.

  Raises:
    ValueError: One line, if there is no such cluster or its file is damaged.
  """
  # A cluster for a fixed number of replicas refuses any other number.
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
  planned: Offer, cluster: str, step_s: float | None, loss: float
) -> Offer:
  """Returns a planned run with its times and losses on a cluster.

  Args:
    planned: The run and its other costs.
    cluster: Name of a preset or path of a cluster file.
    step_s: Duration of an inner step of the run (seconds); None: derived from
      its operations.
    loss: Loss of AllReduce at the end, with the sequences of all replicas in a
      step (nats a token); NaN: not known.

  Raises:
    ValueError: One line, if the run does not fit on the cluster.
  """
  config = planned.config
  plan = method_plans.plan_run(config, cluster, Options(step_s=step_s))
  num_replicas = config.mesh.num_replicas
  steps = config.total_steps
  time_s = steps * plan.rounds.step_s
  tokens = steps * config.tokens_per_replica_step * num_replicas
  # One cluster alone takes the sequences of all replicas, one after the other.
  alone_s = steps * plan.rounds.compute_s * num_replicas
  share = time_s / alone_s
  gap = planned.expected
  return dataclasses.replace(
    planned,
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
  """Returns the factor by which less or more work changes AllReduce's loss.

  Less work is fewer steps or fewer sequences in a step, whichever gives the
  lower loss. More work is more steps.

  Args:
    share: The work that is done, relative to the whole run, e.g. 0.5.
    gain: s, the share by which AllReduce's loss falls when its batch doubles.
  """
  fewer_steps = share_of_more_steps(share)
  if share >= 1:
    return fewer_steps
  # Each halving of the batch divides the loss by 1 - s.
  smaller_batch = (1 - gain) ** math.log2(share)
  return min(fewer_steps, smaller_batch)
