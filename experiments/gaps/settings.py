"""What a run of the study of the gap is: a setting, two rates and a seed.

Runs of one setting differ in rates and seed alone, so they are one program.
"""

import dataclasses
from typing import Any, NamedTuple

from dilocox_jax.config import RunConfig, from_mapping

# Layers, width, heads and width inside the MLP of the decoder, by name.
SIZES = {
  "5k": (1, 8, 1, 12),  # For tests.
  "26k": (2, 24, 1, 64),
  "59k": (2, 40, 1, 108),
  "131k": (2, 64, 2, 172),
  "857k": (4, 128, 4, 344),
  "2300k": (5, 192, 6, 516),
  "10000k": (8, 320, 10, 860),
}
AVERAGE_POWER = 14.0  # Of the average that both sides keep.
FINAL_FRACTION = 0.2  # Last inner rate divided by the highest one.
NUM_VALIDATION_SEQUENCES = 256


class Rates(NamedTuple):
  """Learning rates of a run; AllReduce has no outer step, and a rate of 0."""

  inner: float
  outer: float = 0.0


class Run(NamedTuple):
  """What tells a run from others of its setting."""

  rates: Rates
  seed: int


@dataclasses.dataclass(frozen=True)
class Setting:
  """All of a run but its rates and its seed.

  Attributes:
    size: Name of the model, one of `SIZES`.
    replicas: M. AllReduce has one replica that takes the sequences of all.
    batch: Sequences of a replica's step.
    steps: Inner steps of the run.
    interval: H, inner steps between two sends of a value. 0 is AllReduce.
    delay: Inner steps from a send to its apply; it divides H. 0 waits for the
      exchange. Otherwise H / delay slices are sent in turn.
    bits: 32 sends float32, 1 sends signs with error feedback.
    warm_start: Data-parallel steps at the beginning.
    momentum: Momentum of Muon.
    outer_momentum: Nesterov momentum of the outer step.
    source: Name of the text (`data.source`).
    sequence_length: Tokens that a sequence predicts.
  """

  size: str
  replicas: int
  batch: int
  steps: int
  interval: int = 0
  delay: int = 0
  bits: int = 32
  warm_start: int = 0
  momentum: float = 0.9
  outer_momentum: float = 0.0
  source: str = "stdlib"
  sequence_length: int = 128

  def __post_init__(self):
    """Raises ValueError if the runs of the setting would not end flushed."""
    if self.is_allreduce:
      if self.replicas > 1:
        raise ValueError(f"{self.name}: AllReduce has one replica here")
      return
    rounds = self.steps - self.warm_start
    if rounds % self.interval:
      raise ValueError(
        f"{self.name}: interval={self.interval} must divide the {rounds} steps"
        " after the warm start"
      )
    if self.delay and self.interval % self.delay:
      raise ValueError(
        f"{self.name}: delay={self.delay} must divide interval={self.interval}"
      )

  @property
  def is_allreduce(self) -> bool:
    """Whether gradients are averaged at every step."""
    return not self.interval

  @property
  def method(self) -> str:
    """Name of the method, as `sync.method` has it."""
    if self.is_allreduce:
      return "allreduce"
    return "overlap_loco" if self.delay else "diloco"

  @property
  def global_batch(self) -> int:
    """Sequences of a step of all replicas."""
    return self.replicas * self.batch

  @property
  def tokens(self) -> int:
    """Tokens that a run is trained on."""
    return self.steps * self.global_batch * self.sequence_length

  @property
  def name(self) -> str:
    """A short name without spaces that only this setting has."""
    parts = [self.size, self.method, f"{self.replicas}x{self.batch}"]
    parts += [f"{self.steps}steps"]
    optional = {
      "H": self.interval,
      "delay": self.delay,
      "bits": 0 if self.bits == 32 else self.bits,
      "start": self.warm_start,
      "outer": self.outer_momentum,
      "momentum": 0 if self.momentum == 0.9 else self.momentum,
    }
    parts += [f"{name}{value:g}" for name, value in optional.items() if value]
    return "-".join(parts)

  def config(self, run: Run) -> RunConfig:
    """Returns the config with which the trainer would train a run.

    Args:
      run: Rates and seed.
    """
    return from_mapping({**self._shared(), **self._of_method(run)})

  def _shared(self) -> dict[str, Any]:
    num_layers, model_dim, num_heads, ff_dim = SIZES[self.size]
    has_judge = self.source == "stdlib"
    return {
      "total_steps": self.steps,
      "data.source": self.source,
      "data.batch_size": self.batch,
      "data.sequence_length": self.sequence_length,
      "data.judge_fraction": 0.5 if has_judge else 0.0,
      "model.num_layers": num_layers,
      "model.model_dim": model_dim,
      "model.num_heads": num_heads,
      "model.ff_dim": ff_dim,
      "inner.optimizer": "muon",
      "inner.momentum": self.momentum,
      "inner.final_fraction": FINAL_FRACTION,
      "outer.average_power": AVERAGE_POWER,
      "evaluation.interval_steps": 0,
      "evaluation.num_sequences": NUM_VALIDATION_SEQUENCES,
      "mesh.num_replicas": self.replicas,
    }

  def _of_method(self, run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {
      "seed": run.seed,
      "inner.learning_rate": run.rates.inner,
      "sync.method": self.method,
    }
    if self.is_allreduce:
      return found
    found |= {
      "sync.sync_interval": self.interval,
      "sync.warm_start_steps": self.warm_start,
      "outer.learning_rate": run.rates.outer,
      "outer.momentum": self.outer_momentum,
      "exchange.codec": "float32" if self.bits == 32 else "int(bits=1)",
      "exchange.feedback": 0.0 if self.bits == 32 else 1.0,
    }
    if self.delay:
      found["sync.num_fragments"] = self.interval // self.delay
    return found
