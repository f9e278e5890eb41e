"""Two replicas meet in a process in which JAX cannot be imported.

The folder of the first argument has `config.json` and `tokens`. Beside Python's
own library only a few packages may be imported: numpy, the types of ml_dtypes,
the annotations of jaxtyping, and the buckets of obstore.
"""

import importlib.metadata
import json
import pathlib
import sys
import threading

ALLOWED = {
  "dilocox_jax",
  "jaxtyping",
  "ml_dtypes",
  "numpy",
  "obstore",
  "wadler_lindig",
}
INSTALLED = set(importlib.metadata.packages_distributions())
HIDDEN = INSTALLED - ALLOWED - set(sys.stdlib_module_names)
assert {"jax", "jaxlib", "flax", "optax", "grain", "absl"} <= HIDDEN
for package in HIDDEN:
  sys.modules[package] = None  # pyright: ignore - an import of it fails

import numpy as np  # noqa: E402

import dilocox_jax as dx  # noqa: E402
from dilocox_jax.data.shards import map_corpus  # noqa: E402
from dilocox_jax.models import families  # noqa: E402
from dilocox_jax.plan.model.shapes import ModelShape  # noqa: E402
from dilocox_jax.reference.codecs import CODECS  # noqa: E402
from dilocox_jax.reference.messages import Messages  # noqa: E402
from dilocox_jax.reference.optimizers import Sgd  # noqa: E402

SHAPE = ModelShape(2, 8, 2, 12, 20)
TARGETS = {"oslo": 1.0, "rome": 3.0}  # Values toward which a replica moves.
EVENTS = 8


def train(folder, name):
  """Trains a replica, and returns its outer parameters."""
  terms = dx.mailbox_terms(json.loads((folder / "config.json").read_text()))
  box = dx.Mailbox(
    folder / "place",
    name=name,
    secret=b"s" * 64,
    config=terms.config,
    rules=terms.rules,
    text_digest=map_corpus(str(folder / "tokens")).digest,
  )
  theta = {
    path: np.zeros(shape, np.float32)
    for path, shape in SHAPE.parameter_shapes.items()
  }
  outer = Sgd(0.7)
  codec = CODECS[terms.fields["exchange.codec"]]
  messages = Messages(codec, theta, feedback=1.0)
  assert box.newest() is None
  for event in range(EVENTS):
    box.announce(event)
    delta = {path: leaf - TARGETS[name] for path, leaf in theta.items()}
    arrays, _ = messages.encode(delta)
    shared = [*theta.values(), np.asarray(event, np.int32)]
    exchanged = box.exchange(
      event,
      0,
      arrays,
      state=box.fingerprint(event, shared),
      snapshot=lambda event=event, shared=shared: (event, shared),
    )
    theta = outer.step(theta, messages.mean(exchanged.messages))
    messages.settle(exchanged, name)
  return theta


def main():
  """Trains both replicas, and compares them."""
  folder = pathlib.Path(sys.argv[1])
  results = {}

  def run(name):
    results[name] = train(folder, name)

  threads = [threading.Thread(target=run, args=[name]) for name in TARGETS]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for path, leaf in results["oslo"].items():
    assert leaf.tobytes() == results["rome"][path].tobytes()
    assert np.abs(leaf - 2.0).max() < 0.01
  tensors = dict(families.tensors_of(results["oslo"], SHAPE, "llama"))
  assert tensors["model.layers.1.mlp.up_proj.weight"].shape == (12, 8)
  print("two replicas met without JAX")


if __name__ == "__main__":
  main()
