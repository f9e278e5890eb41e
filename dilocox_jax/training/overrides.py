"""Objects that the caller passes to a run in place of what its config names."""

import dataclasses

import optax

from dilocox_jax.aggregator import Aggregator
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.feeds import Feed
from dilocox_jax.models.adapters import Adaptation
from dilocox_jax.models.loss import LossModel
from dilocox_jax.rounds.exchanges import MailboxExchange


@dataclasses.dataclass(frozen=True)
class Overrides:
  """Objects that take the place of those that the config of a run names.

  Except for `trainable`, a field that is None leaves the choice to the config.

  Attributes:
    model: Model to train, in place of `config.model`.
    data: Text, or data of another kind, in place of `config.data.source`.
    inner_optimizer: Optimizer of the replicas, in place of the one that
      `config.inner` names. It has its own learning rate.
      `config.inner.accumulate_steps` is still used.
    outer_optimizer: Optimizer of the outer parameters, in place of the one that
      `config.outer` names. `config.outer.average_power` is still used.
    exchange: Averages a fragment (a part of the parameters) over the replicas,
      in place of `config.exchange`. For a run with a mailbox the caller leaves
      it None, and the trainer sets it.
    trainable: The part of the model that is trained; None means the whole
      model. `start.with_trainable` builds it, also for the adapters that a
      config names (`config.lora`).
  """

  model: LossModel | None = None
  data: Corpus | Feed | None = None
  inner_optimizer: optax.GradientTransformation | None = None
  outer_optimizer: optax.GradientTransformation | None = None
  exchange: Aggregator | MailboxExchange | None = None
  trainable: Adaptation | None = None

  @property
  def names(self) -> list[str]:
    """Names of the fields that are set, for the record of the run.

    For "trainable", the list has the digest of the frozen weights instead.
    """
    names = []
    for name, override in vars(self).items():
      if name != "trainable" and override is not None:
        names.append(name)
    if self.trainable:
      names.append(f"frozen weights {self.trainable.digest}")
    return names


NO_OVERRIDES = Overrides()
