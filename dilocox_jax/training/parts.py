"""What the caller hands in to a run: parts of it, and a simulated clock."""

import dataclasses
from typing import Any, Protocol

import optax

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.feeds import Feed
from dilocox_jax.models.adapters import Adaptation
from dilocox_jax.models.loss import LossModel
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.rounds.exchanges import MailboxExchange


@dataclasses.dataclass(frozen=True)
class Parts:
  """What takes the place of parts that the config names; None changes nothing.

  Attributes:
    model: Model to train, in place of `config.model`.
    data: Text, or data of another kind, in place of `config.data.source`.
    inner_optimizer: Optimizer of the replicas, in place of `config.inner`. It
      has its own learning rate.
    outer_optimizer: Optimizer of the outer parameters, in place of
      `config.outer`.
    exchange: Averages one fragment over the replicas, in place of
      `config.exchange`. The trainer puts that of a mailbox here.
    trainable: What is trained of the model, if not all of it.
  """

  model: LossModel | None = None
  data: Corpus | Feed | None = None
  inner_optimizer: optax.GradientTransformation | None = None
  outer_optimizer: optax.GradientTransformation | None = None
  exchange: Aggregator | MailboxExchange | None = None
  trainable: Adaptation | None = None

  @property
  def names(self) -> list[str]:
    """Names of the parts that are handed in, for the record of the run.

    Of a model that is trained in part the frozen values count too.
    """
    names = [name for name, part in vars(self).items() if part is not None]
    if self.trainable:
      names[-1] = f"frozen weights {self.trainable.digest}"
    return names


NO_PARTS = Parts()


class Clock(Protocol):
  """Simulated time of a run, on some cluster.

  The trainer advances it after every segment and records what it returns.
  Nothing else reads it, so no loss can depend on a link. `api.simulation_setup`
  makes one from a cluster's description.

  Attributes:
    description: What is timed, for reports, e.g. "cluster 1gbit".
    digest: Short digest of all that its times depend on beside the run.
  """

  description: str
  digest: str

  def advance(self, segment: Segment, traffic: Traffic) -> float:
    """Advances by a segment; returns seconds since the start of the run.

    Args:
      segment: Next segment of the run.
      traffic: Bytes that its exchanges send.
    """
    ...

  def finish(self, plan: RunPlan, traffic: Traffic) -> float:
    """Advances by the flush; returns seconds since the start of the run.

    Args:
      plan: Plan of the run.
      traffic: Bytes that the exchanges of the flush send.
    """
    ...

  def get_state(self) -> dict[str, Any]:
    """Returns what a checkpoint must hold, as plain values."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from what `get_state` returned.

    Raises:
      ValueError: If that was the clock of another cluster.
    """
    ...
