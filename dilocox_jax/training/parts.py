"""Parts of a run that the caller hands in instead of naming them."""

import dataclasses

import optax

from dilocox_jax.data.corpus import Corpus
from dilocox_jax.data.feeds import Feed
from dilocox_jax.models.adapters import Adaptation
from dilocox_jax.models.loss import LossModel
from dilocox_jax.trees import Aggregator


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
      `config.exchange`.
    trainable: What is trained of the model, if not all of it.
  """

  model: LossModel | None = None
  data: Corpus | Feed | None = None
  inner_optimizer: optax.GradientTransformation | None = None
  outer_optimizer: optax.GradientTransformation | None = None
  exchange: Aggregator | None = None
  trainable: Adaptation | None = None

  @property
  def names(self) -> list[str]:
    """Names of the parts that are handed in, for the record of the run."""
    return [name for name, part in vars(self).items() if part is not None]


NO_PARTS = Parts()
