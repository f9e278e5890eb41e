"""Runs of replicas that meet in a folder, one of them perhaps in PyTorch."""

import dataclasses
import importlib.util
import json
import pathlib
import threading
import time

import jax
import numpy as np

from dilocox_jax.config import from_mapping
from dilocox_jax.data import shards, tokenizers
from dilocox_jax.data.documents import Document
from dilocox_jax.mailbox_protocol import fingerprints
from dilocox_jax.models import weights
from dilocox_jax.models.transformer import build_model
from dilocox_jax.training.mailbox_replica import MailboxAddress
from dilocox_jax.training.trainer import Trainer
from dilocox_jax.trees import leaves_by_path
from tests import runs
from tests.mailbox.apart import in_threads

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/pytorch_replica.py"
PYTORCH = "paris"  # Name of the replica in PyTorch.
NAMES = ("oslo", "rome", PYTORCH)
SAVING = threading.Lock()
CODECS = {
  "float32": {"codec": "float32", "feedback": 0.0},
  "int(bits=1)": {"codec": "int(bits=1)", "feedback": 1.0},
}
MODEL = {
  "preset": "nano",
  "model_dim": 32,
  "num_heads": 4,
  "num_kv_heads": 2,
  "ff_dim": 64,
  "scan_unroll": 1,
}


def load_example():
  """The example as a module."""
  spec = importlib.util.spec_from_file_location("pytorch_replica", EXAMPLE)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def config_of(folder, codec, *, seed=0, total_steps=24):
  """The config of a run of three replicas."""
  return from_mapping(
    {
      "seed": seed,
      "total_steps": total_steps,
      "data": {
        "source": "shards",
        "glob": str(folder / "tokens"),
        "batch_size": 8,
        "sequence_length": 32,
      },
      "model": MODEL,
      "inner": {"warmup_steps": 4, "learning_rate": 4e-3},
      "sync": {"method": "diloco", "sync_interval": 6},
      "exchange": {**CODECS[codec], "collective": "mailbox"},
      # On a busy machine a replica may compile for minutes.
      "mailbox": {
        "snapshot_every": 2,
        "quorum": 3,
        "grace_s": 300.0,
        "shares": "off",
      },
      "mesh": {"num_replicas": 3, "layout": "stacked"},
      "evaluation": {"interval_steps": total_steps, "num_sequences": 256},
      "checkpoint": {
        "interval_steps": total_steps,
        "init_from": str(folder / "start"),
      },
    }
  )


def write_inputs(folder):
  """Writes tokens, a first checkpoint and a secret into a folder."""
  documents = [
    Document(str(path.relative_to(ROOT)), path.read_bytes())
    for path in sorted((ROOT / "dilocox_jax").rglob("*.py"))
  ]
  tokenizer = tokenizers.byte_tokenizer()
  for _ in shards.write(folder / "tokens", documents, tokenizer, 0.05):
    pass
  (folder / "start").mkdir()
  config = from_mapping({"model": MODEL})
  shape = config.model.shape
  params = jax.jit(build_model(shape).init)(jax.random.key(0))
  weights.write_checkpoint(folder / "start", shape, params)
  secret = folder / "run.secret"
  secret.write_text("s" * 64)
  secret.chmod(0o600)


def arguments(inputs, run, *, replica=PYTORCH, config=None):
  """The command line of the replica in PyTorch."""
  values = {
    "config": config or run / "oslo/config.json",
    "checkpoint": inputs / "start",
    "tokens": inputs / "tokens",
    "mailbox": run / "place",
    "secret": inputs / "run.secret",
    "replica": replica,
    "save": run / replica,
  }
  return [f"--{name}={value}" for name, value in values.items()]


def train_jax(inputs, run, name, config):
  """Trains a replica in JAX."""
  address = MailboxAddress(run / "place", name, inputs / "run.secret")
  trainer = Trainer(config, run / name, address=address)
  save = trainer._save

  def save_alone(state):  # Orbax numbers the saves of a process, not of a run.
    with SAVING:
      save(state)
      trainer._checkpoints.wait()

  trainer._save = save_alone
  trainer.run()


def train_three(inputs, run, config, pytorch):
  """Trains three replicas that meet; `pytorch` is the example, or None.

  Returns:
    The final loss of the outer parameters.
  """
  run.mkdir()

  def train(number):
    name = NAMES[number]
    if name != PYTORCH or pytorch is None:
      train_jax(inputs, run, name, config)
      return
    while not (run / "oslo/config.json").exists():
      time.sleep(0.1)
    pytorch.main(arguments(inputs, run))

  in_threads(train, len(NAMES))
  (final,) = runs.rows(run / "oslo", "final")
  return final["outer_loss"]


def members(run, name="oslo"):
  """The replicas of each event, as a replica in JAX has recorded them."""
  lines = (run / name / "mailbox.jsonl").read_text().splitlines()
  return [sorted(json.loads(line)["members"]) for line in lines]


def largest_difference(run):
  """Relative distance of PyTorch's outer parameters, of the worst leaf."""
  state, _ = runs.saved(run / "oslo")
  (fragment,) = state.fragments
  leaves = leaves_by_path(fragment.params)
  _, other = weights.read_checkpoint(run / PYTORCH)
  others = leaves_by_path(other)
  assert leaves.keys() == others.keys()
  return max(
    float(np.linalg.norm(leaf - others[path]) / np.linalg.norm(leaf))
    for path, leaf in leaves.items()
  )


@dataclasses.dataclass
class Gaps:
  """How far fingerprints were apart, and what rounding explains.

  Attributes:
    largest: Largest distance of a block, relative to its norm.
    tolerance: What rounding explained there.
    num_compared: Number of pairs of fingerprints that were compared.
  """

  largest: float = 0.0
  tolerance: float = 0.0
  num_compared: int = 0


def record_gaps(patch):
  """Records the gaps of the fingerprints that are compared from now on."""
  gaps = Gaps()
  compare = fingerprints.difference

  def difference(one, other, num_events):
    largest = fingerprints._relative_gaps(one.rows, other.rows).max()
    gaps.num_compared += 1
    if largest >= gaps.largest:
      gaps.largest = float(largest)
      unit = 2.0**-24
      gaps.tolerance = unit * (63 + 1 + num_events)
    return compare(one, other, num_events)

  patch.setattr(fingerprints, "difference", difference)
  return gaps
