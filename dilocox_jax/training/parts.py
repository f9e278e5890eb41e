"""Objects that the user supplies to a run: parts of it, and a clock."""

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
  """Parts that the user supplies in place of those that the config names.

  None means that the part of the config is used.

  Attributes:
    model: Model to train, in place of `config.model`.
    data: Text, or data of another kind, in place of `config.data.source`.
    inner_optimizer: Optimizer of the replicas, in place of `config.inner`. It
      has its own learning rate.
    outer_optimizer: Optimizer of the outer parameters, in place of
      `config.outer`.
    exchange: Averages one fragment over the replicas, in place of
      `config.exchange`. For a run with a mailbox the trainer sets it.
    trainable: The part of the model that is trained; None means all of it.
  """

  model: LossModel | None = None
  data: Corpus | Feed | None = None
  inner_optimizer: optax.GradientTransformation | None = None
  outer_optimizer: optax.GradientTransformation | None = None
  exchange: Aggregator | MailboxExchange | None = None
  trainable: Adaptation | None = None

  @property
  def names(self) -> list[str]:
    """Names of the supplied parts, for the record of the run.

    If only a part of the model is trained, the list has the digest of the
    frozen weights instead of "trainable".
    """
    names = []
    for name, part in vars(self).items():
      if name != "trainable" and part is not None:
        names.append(name)
    if self.trainable:
      names.append(f"frozen weights {self.trainable.digest}")
    return names


NO_PARTS = Parts()


class Clock(Protocol):
  """Simulated time of a run on a cluster.

  The trainer advances the clock after every segment and records the time that
  it returns. Nothing else reads the clock, so no loss can depend on a link.
  `api.simulation_setup` makes a clock from the description of a cluster.

  Attributes:
    description: Name of the simulated cluster for reports, e.g. "cluster
      1gbit".
    digest: Short digest of everything that the times depend on, except the
      run itself.
  """

  description: str
  digest: str

  def advance(self, segment: Segment, traffic: Traffic) -> float:
    """Advances by a segment and returns seconds since the start of the run.

    Args:
      segment: Next segment of the run.
      traffic: Bytes that its exchanges send.
    """
    ...

  def finish(self, plan: RunPlan, traffic: Traffic) -> float:
    """Advances by the flush and returns seconds since the start of the run.

    Args:
      plan: Plan of the run.
      traffic: Bytes that the exchanges of the flush send.
    """
    ...

  def get_state(self) -> dict[str, Any]:
    """Returns the state of the clock for a checkpoint, as JSON values."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores what `get_state` returned.

    Raises:
      ValueError: If the state is that of another cluster's clock.
    """
    ...
