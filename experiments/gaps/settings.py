"""What a run of the study of the gap is: a setting, two rates and a seed.

Runs of one setting differ in rates and seed alone, so one JAX program can train
several of them.
"""

import dataclasses
from typing import Any, NamedTuple

from dilocox_jax.config import RunConfig, from_mapping

# Sizes of the decoder by name, which is about the number of parameters: layers,
# width, attention heads, and width inside the MLP.
SIZES = {
  "5k": (1, 8, 1, 12),  # For tests.
  "26k": (2, 24, 1, 64),
  "59k": (2, 40, 1, 108),
  "131k": (2, 64, 2, 172),
  "857k": (4, 128, 4, 344),
  "2300k": (5, 192, 6, 516),
  "10000k": (8, 320, 10, 860),
}
# Power of the average of the parameters that is evaluated (`outer.average`).
# AllReduce has the same.
AVERAGE_POWER = 14.0
# Texts that are files of the machine, by name: the glob of the files. On Debian
# they come with the packages linux-libc-dev (headers), perl-modules, nodejs
# (JavaScript), and iproute2, systemd, util-linux and others (manual pages), so
# machines have different texts.
FILES = {
  "manual_pages": "/usr/share/man/man8/*.gz",
  "c_headers": "/usr/include/linux/**/*.h",
  "perl_modules": "/usr/share/perl/**/*.pm",
  "javascript": "/usr/lib/node_modules/npm/**/*.js",
}
FINAL_FRACTION = 0.2  # Last inner rate divided by the highest inner rate.
NUM_VALIDATION_SEQUENCES = 256


class Rates(NamedTuple):
  """Learning rates of a run.

  Attributes:
    inner: Highest learning rate of the inner optimizer.
    outer: Learning rate of the outer step; 0 for AllReduce, which has none.
  """

  inner: float
  outer: float = 0.0


class Run(NamedTuple):
  """The rates and the seed, which identify a run of a setting.

  Attributes:
    rates: Learning rates.
    seed: Seed of the first parameters and of the order of the sequences.
  """

  rates: Rates
  seed: int


@dataclasses.dataclass(frozen=True)
class Setting:
  """The settings of a run, except for its rates and its seed.

  Attributes:
    size: Name of the model's size, one of `SIZES`.
    replicas: Number of replicas, M. AllReduce has a single replica, which takes
      all sequences of a step.
    batch: Sequences in a step of one replica.
    steps: Inner steps of the run.
    interval: Number of inner steps of a round, H; 0: the method is AllReduce.
    delay: Number of inner steps from when a pseudo-gradient is sent to when its
      mean is applied. It divides H, and the parameters are sent in H / delay
      fragments. 0: replicas wait for the mean.
    bits: Bits of a value that is sent: 32 (float32), or 1 (signs, with error
      feedback).
    warm_start: Data-parallel steps at the beginning.
    momentum: Momentum of Muon, the inner optimizer.
    outer_momentum: Nesterov momentum of the outer step.
    source: Name of the text: a key of `FILES`, or a value of `data.source`.
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
    """Raises ValueError unless the setting can be trained as one program.

    AllReduce must have one replica. Other runs must have whole rounds after
    the warm start, and H must be a multiple of the delay.
    """
    if self.is_allreduce:
      if self.replicas > 1:
        raise ValueError(f"{self.name}: AllReduce has one replica here")
      return
    round_steps = self.steps - self.warm_start
    if round_steps % self.interval:
      raise ValueError(
        f"{self.name}: interval={self.interval} must divide the {round_steps}"
        " steps after the warm start"
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
    """Name of the method, a value of `sync.method`."""
    if self.is_allreduce:
      return "allreduce"
    return "overlap_loco" if self.delay else "diloco"

  @property
  def global_batch(self) -> int:
    """Sequences in a step of all replicas together."""
    return self.replicas * self.batch

  @property
  def tokens(self) -> int:
    """Tokens that all replicas of a run together are trained on."""
    return self.steps * self.global_batch * self.sequence_length

  @property
  def name(self) -> str:
    """A short name, which leaves out usual values and the sequence length.

    Example: "59k-overlap_loco-4x4-576steps-H16-delay2-bits1".
    """
    parts = [self.size, self.method, f"{self.replicas}x{self.batch}"]
    parts.append(f"{self.steps}steps")
    unusual = {
      "H": self.interval,
      "delay": self.delay,
      "bits": 0 if self.bits == 32 else self.bits,
      "start": self.warm_start,
      "outer": self.outer_momentum,
      "momentum": 0 if self.momentum == 0.9 else self.momentum,
    }
    parts += [f"{name}{value:g}" for name, value in unusual.items() if value]
    if self.source in FILES:
      parts.append(self.source)
    return "-".join(parts)

  def config(self, run: Run) -> RunConfig:
    """Returns the config with which the trainer would train a run."""
    return from_mapping({**self._shared_values(), **self._method_values(run)})

  def _shared_values(self) -> dict[str, Any]:
    """Returns values of the config that all methods have, by dotted name."""
    num_layers, model_dim, num_heads, ff_dim = SIZES[self.size]
    return {
      "total_steps": self.steps,
      **self._text_values(),
      "data.batch_size": self.batch,
      "data.sequence_length": self.sequence_length,
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

  def _text_values(self) -> dict[str, Any]:
    """Returns values of the config that name the text, by dotted name."""
    if self.source in FILES:
      values = {"data.source": "text_files", "data.glob": FILES[self.source]}
    else:
      values = {"data.source": self.source}
    # A text that is drawn at random is not divided into files, from which the
    # judge text could be taken.
    has_judge = self.source != "synthetic"
    return {**values, "data.judge_fraction": 0.5 if has_judge else 0.0}

  def _method_values(self, run: Run) -> dict[str, Any]:
    """Returns values of the method, its rates and the seed, by dotted name."""
    values: dict[str, Any] = {
      "seed": run.seed,
      "inner.learning_rate": run.rates.inner,
      "sync.method": self.method,
    }
    if self.is_allreduce:
      return values
    values |= {
      "sync.sync_interval": self.interval,
      "sync.warm_start_steps": self.warm_start,
      "outer.learning_rate": run.rates.outer,
      "outer.momentum": self.outer_momentum,
      "exchange.codec": "float32" if self.bits == 32 else "int(bits=1)",
      "exchange.feedback": 0.0 if self.bits == 32 else 1.0,
    }
    if self.delay:
      values["sync.num_fragments"] = self.interval // self.delay
    return values
