"""Trains a small model through a mailbox, to compare two ways to average.

With shares each replica computes a part of the mean of all messages, and reads
the other parts. Without shares each replica computes the whole mean.

The model (about 35,000 parameters, in numpy) guesses the next character of
Python's own library from the eight before it. The method is DiLoCo with Adam as
inner optimizer. Messages of fewer than 32 bits a value have error feedback.
All replicas are threads that share a store in simulated time.
"""

import dataclasses
import functools
import os
import pathlib

import numpy as np

from dilocox_jax.mailbox_protocol.mailbox import Mailbox
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.reference.row_codecs import FloatRows, IntRows
from dilocox_jax.reference.shares import Tables
from experiments.tools.simulated_store import SimulatedStore, SimulatedTime

_SECRET = b"x" * 64
_FILES = ("argparse.py", "inspect.py", "pathlib.py", "typing.py", "zipfile.py")
_HELD_OUT = "tarfile.py"
_VOCABULARY = 128  # ASCII.
_CONTEXT = 8  # Characters from which the next one is guessed.
_EMBEDDING = 16  # Width of the embedding.
_HIDDEN = 128  # Width of the hidden layer.
_SEQUENCES = 4  # Sequences of a replica in an inner step.
_LENGTH = 64  # Characters that are guessed in a sequence.
_INNER_STEPS = 8  # Of a round.
_INNER_RATE = 0.003
_OUTER_RATE = 0.7
_MOMENTUM = 0.6
_WIDTH = 64  # Values of a row of the codec.
_SHAPES = (
  (_VOCABULARY, _EMBEDDING),
  (_CONTEXT * _EMBEDDING, _HIDDEN),
  (_HIDDEN, _VOCABULARY),
)


@dataclasses.dataclass(frozen=True)
class LossRun:
  """A short training run through a mailbox, whose final loss is measured.

  Attributes:
    num_replicas: Number of replicas, M.
    shares: Whether each replica computes a share of the mean, and not all of
      it: "on", "off" or "auto" (`MailboxRules.shares`).
    bits: Bits of a value in messages; 32: float32.
    seed: Seed of the first parameters and of the draws from the text.
    num_events: Number of exchanges. Eight inner steps come before each.
  """

  num_replicas: int
  shares: str
  bits: int
  seed: int
  num_events: int

  def train(self) -> float:
    """Trains the run, and returns the loss on held-out text (nats a character).

    The loss is that of the first replica's outer parameters.
    """
    world = SimulatedTime()
    objects: dict[str, bytes] = {}
    losses: dict[int, float] = {}

    def run_replica(number: int) -> None:
      store = SimulatedStore(world, objects, latency_s=0.01)
      # Replicas enter one after the other, in the order of their numbers.
      store.pause(float(number))
      mailbox = Mailbox(
        store,
        name=f"r{number}",
        secret=_SECRET,
        config={},
        # A mailbox takes the norm of a whole message from its floating-point
        # arrays, but here all arrays are bytes. With ratios as large as these,
        # norms change no weight.
        rules=MailboxRules(
          replicas=self.num_replicas,
          quorum=1,
          shares=self.shares,
          max_norm_ratio=1e6,
          full_weight_ratio=1e6,
        ),
        clock=store.clock,
        pause=store.pause,
      )
      mailbox.newest()  # No snapshot is there, so it begins at event 0.
      losses[number] = self._train_replica(mailbox, number)

    world.run(
      [
        functools.partial(run_replica, number)
        for number in range(self.num_replicas)
      ]
    )
    return losses[0]

  def _train_replica(self, mailbox: Mailbox, number: int) -> float:
    """Trains replica `number`, and returns its loss on held-out text."""
    codec = FloatRows() if self.bits == 32 else IntRows(self.bits)
    tables = Tables(codec, widths=(_WIDTH,), has_residual=not codec.is_exact)
    text = np.concatenate([_text_of(name) for name in _FILES])
    draws = np.random.default_rng((self.seed, number))
    outer = _first_params(self.seed)
    momentum = np.zeros_like(outer)
    residual = np.zeros_like(outer)
    adam = _Adam(outer.size)
    for event in range(self.num_events):
      mailbox.announce(event)
      params = outer.copy()
      for _ in range(_INNER_STEPS):
        _, gradient = loss_and_gradient(params, *_batch(text, draws))
        params -= adam.update(gradient)
      # The pseudo-gradient, plus what earlier messages have lost.
      corrected = (outer - params + residual).reshape(-1, _WIDTH)
      encoded = codec.encode(corrected)
      exchanged = mailbox.exchange(event, turn=0, arrays=encoded, tables=tables)
      sent = codec.decode(encoded, _WIDTH)
      # With shares the result has the mean, otherwise all messages.
      if exchanged.mean is not None:
        mean = codec.decode(exchanged.mean, _WIDTH)
      else:
        mean = np.average(
          [codec.decode(each, _WIDTH) for _, _, each in exchanged.messages],
          axis=0,
          weights=[weight for _, weight, _ in exchanged.messages],
        )
      # A message that was not averaged is lost as a whole.
      if exchanged.is_own_listed:
        residual = (corrected - sent).reshape(-1)
      else:
        residual = corrected.reshape(-1)
      step = mean.reshape(-1).astype(np.float32)
      # SGD with Nesterov momentum.
      momentum = np.float32(_MOMENTUM) * momentum + step
      outer -= np.float32(_OUTER_RATE) * (step + _MOMENTUM * momentum)
    held_out = _text_of(_HELD_OUT)
    windows = np.lib.stride_tricks.sliding_window_view(held_out, _CONTEXT + 1)
    # To save time, only every n-th character is guessed, 8,192 or some more.
    windows = windows[:: max(len(windows) // 8192, 1)]
    loss, _ = loss_and_gradient(outer, windows[:, :-1], windows[:, -1])
    return loss


class _Adam:
  """Adam (Kingma and Ba, 2015) with the betas 0.9 and 0.99."""

  def __init__(self, size: int):
    """Starts with moments of zeros for `size` parameters."""
    self._mean = np.zeros(size, np.float32)
    self._square = np.zeros(size, np.float32)
    self._count = 0

  def update(self, gradient: np.ndarray) -> np.ndarray:
    """Returns the values to subtract from the parameters, [size]."""
    self._count += 1
    self._mean += np.float32(0.1) * (gradient - self._mean)
    self._square += np.float32(0.01) * (gradient**2 - self._square)
    mean = self._mean / np.float32(1 - 0.9**self._count)
    square = self._square / np.float32(1 - 0.99**self._count)
    return np.float32(_INNER_RATE) * mean / (np.sqrt(square) + 1e-8)


def loss_and_gradient(
  params: np.ndarray, contexts: np.ndarray, targets: np.ndarray
) -> tuple[float, np.ndarray]:
  """Returns the mean cross-entropy (nats a character), and its gradient [P].

  Args:
    params: All parameters, float32 [P].
    contexts: The characters before each target, [N, 8].
    targets: The characters to guess, [N].
  """
  table, hidden_kernel, output_kernel = _leaves(params)
  inputs = table[contexts].reshape(len(contexts), -1)
  hidden = np.tanh(inputs @ hidden_kernel)
  logits = hidden @ output_kernel
  logits -= logits.max(axis=1, keepdims=True)
  log_sums = np.log(np.exp(logits).sum(axis=1, keepdims=True))
  log_probabilities = logits - log_sums
  rows = np.arange(len(targets))
  loss = -float(log_probabilities[rows, targets].mean())
  # The derivatives of the loss by the values of each layer, from the last one.
  by_logits = np.exp(log_probabilities)
  by_logits[rows, targets] -= 1
  by_logits /= np.float32(len(targets))
  by_hidden = (by_logits @ output_kernel.T) * (1 - hidden**2)
  by_inputs = by_hidden @ hidden_kernel.T
  by_table = np.zeros_like(table)
  np.add.at(by_table, contexts, by_inputs.reshape(*contexts.shape, -1))
  gradients = [by_table, inputs.T @ by_hidden, hidden.T @ by_logits]
  return loss, np.concatenate([each.reshape(-1) for each in gradients])


def _leaves(params: np.ndarray) -> list[np.ndarray]:
  """Divides the parameters [P] into the kernels of the layers (`_SHAPES`)."""
  leaves = []
  start = 0
  for rows, columns in _SHAPES:
    stop = start + rows * columns
    leaves.append(params[start:stop].reshape(rows, columns))
    start = stop
  return leaves


def _first_params(seed: int) -> np.ndarray:
  """Draws the first parameters, float32 [P]; all replicas draw the same."""
  draws = np.random.default_rng(seed)
  leaves = [
    draws.normal(size=rows * columns) / np.sqrt(rows)
    for rows, columns in _SHAPES
  ]
  return np.concatenate(leaves).astype(np.float32)


@functools.cache
def _text_of(name: str) -> np.ndarray:
  """Returns the ASCII codes of a file of Python's own library, int64 [N].

  Other characters are left out.
  """
  path = pathlib.Path(os.__file__).parent / name
  if path.is_file():
    data = path.read_bytes()
  else:  # A package since Python 3.12 or 3.13.
    data = (path.with_suffix("") / "__init__.py").read_bytes()
  codes = np.frombuffer(data, np.uint8)
  return codes[codes < _VOCABULARY].astype(np.int64)


def _batch(
  text: np.ndarray, draws: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
  """Draws random sequences from a text.

  Returns the eight characters before each target, [N, 8], and the targets, [N].
  """
  starts = draws.integers(0, len(text) - _LENGTH - _CONTEXT, size=_SEQUENCES)
  windows = np.lib.stride_tricks.sliding_window_view(text, _CONTEXT + 1)
  chosen = np.concatenate(
    [windows[start : start + _LENGTH] for start in starts]
  )
  return chosen[:, :-1], chosen[:, -1]
