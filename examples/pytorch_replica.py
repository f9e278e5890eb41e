"""Trains one replica in PyTorch beside JAX replicas that meet in a store.

  python examples/pytorch_replica.py --config=runs/oslo/config.json \
    --checkpoint=start --tokens=tokens --mailbox=runs/place \
    --secret=run.secret --replica=paris

JAX need not be installed; docs/guides/pytorch_replica.md has all commands. The
method is DiLoCo (arXiv 2311.08105): H steps of AdamW in each replica, then an
outer step of SGD with the mean pseudo-gradient of all replicas.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
import torch
import transformers

import dilocox_jax as dx
from dilocox_jax.data.shards import map_corpus
from dilocox_jax.models import families
from dilocox_jax.reference.codecs import CODECS
from dilocox_jax.reference.messages import Messages
from dilocox_jax.reference.optimizers import Sgd, warmup_cosine

# What this program computes, by field of the config. None: not set.
COMPUTED = {
  "sync.method": ["diloco"],
  "sync.num_fragments": [None, 1],
  "sync.overlap_steps": [None, 0],
  "sync.rule": [None, "reset"],
  "sync.first_interval": [None],
  "exchange.codec": list(CODECS),
  "exchange.against": ["own"],
  "exchange.keep_unsent": [False],
  "inner.optimizer": ["adamw"],
  "inner.schedule": ["cosine"],
  "outer.optimizer": ["sgd"],
  "outer.schedule": ["constant"],
  "outer.average_power": [0.0],
  "data.mix": [""],
  "mailbox.shares": ["off"],
  "data.document_masks": [False],
  "model.z_loss": [0.0],
  "lora.rank": [0],
}


class InnerSteps:
  """A model of transformers, and AdamW that trains it on a share of a text."""

  def __init__(self, checkpoint, fields, tokens, device):
    """Loads the checkpoint from which all replicas start."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    self.module = load(checkpoint, dtype=torch.float32).to(device)
    model_config = pathlib.Path(checkpoint, "config.json").read_text()
    self.shape = families.shape_of(json.loads(model_config))
    self.family = families.family_of(self.shape)
    self.fields = fields
    self.device = device
    width = fields["data.sequence_length"] + 1
    self.sequences = tokens[: len(tokens) // width * width].reshape(-1, width)
    self.learning_rate = warmup_cosine(
      fields["inner.learning_rate"],
      warmup_steps=fields["inner.warmup_steps"],
      total_steps=fields["total_steps"],
      final_fraction=fields["inner.final_fraction"],
    )
    self.optimizer = torch.optim.AdamW(
      self.module.parameters(),
      betas=(fields["inner.b1"], fields["inner.b2"]),
      weight_decay=fields["inner.weight_decay"],
    )

  def read_leaves(self):
    """Returns the parameters by path, as JAX replicas have them."""
    tensors = {
      name: tensor.detach().cpu().numpy()
      for name, tensor in self.module.named_parameters()
    }
    return families.leaves_of(tensors, self.shape, self.family)

  @torch.no_grad()
  def write_leaves(self, leaves):
    """Sets the parameters; reverses `read_leaves`."""
    tensors = dict(self.module.named_parameters())
    for name, values in families.tensors_of(leaves, self.shape, self.family):
      tensors[name].copy_(torch.tensor(values))

  def take(self, steps, seat):
    """Takes inner steps on the share of a seat, and returns the mean loss."""
    share = self.sequences[seat :: self.fields["mesh.num_replicas"]]
    draws = np.random.default_rng([self.fields["seed"], seat])
    order = draws.permutation(len(share))
    size = self.fields["data.batch_size"]
    losses = []
    for step in steps:
      places = np.arange(step * size, (step + 1) * size) % len(order)
      batch = share[order[places]].astype(np.int64)
      tokens = torch.tensor(batch, device=self.device)
      logits = self.module(tokens[:, :-1]).logits.flatten(0, 1)
      loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
      self.optimizer.zero_grad()
      loss.backward()
      largest_norm = self.fields["inner.clip_norm"] or float("inf")
      torch.nn.utils.clip_grad_norm_(self.module.parameters(), largest_norm)
      self.optimizer.param_groups[0]["lr"] = self.learning_rate(step)
      self.optimizer.step()
      losses.append(loss.item())
    return np.mean(losses)


def train(box, inner, terms, theta):
  """Goes through all events, from the newest snapshot or the first leaves."""
  fields = terms.fields
  outer = Sgd(
    fields["outer.learning_rate"],
    momentum=fields["outer.momentum"] or None,
    nesterov=fields["outer.nesterov"],
  )
  if fields["outer.momentum"]:
    outer.trace = {path: np.zeros_like(leaf) for path, leaf in theta.items()}
  messages = Messages(
    codec=CODECS[fields["exchange.codec"]],
    like=theta,
    feedback=fields["exchange.feedback"],
  )
  snapshot = box.newest()
  event = snapshot.first if snapshot else 0
  if snapshot:
    arrays = iter(snapshot.arrays)
    theta = {path: next(arrays) for path in theta}
    outer.trace = {path: next(arrays) for path in outer.trace}
  interval = terms.method.schedule.sync_interval
  while event * interval < fields["total_steps"]:
    stop = min((event + 1) * interval, fields["total_steps"])
    steps = range(event * interval, stop)
    inner.write_leaves(theta)
    attends = box.announce(event)
    seat = box.seat % fields["mesh.num_replicas"]
    loss = inner.take(steps, seat) if attends else float("nan")
    delta = {path: theta[path] - w for path, w in inner.read_leaves().items()}
    arrays, is_finite = messages.encode(delta)
    num_sequences = len(steps) * fields["data.batch_size"]
    # JAX replicas have the shared arrays in this order.
    shared = [*theta.values(), *outer.trace.values(), np.int32(event)]
    exchanged = box.exchange(
      event,
      0,
      arrays,
      weight=float(num_sequences * fields["data.sequence_length"] * is_finite),
      send=attends,
      state=box.fingerprint(event, shared),
      snapshot=lambda event=event, shared=shared: (event, shared),
    )
    theta = outer.step(theta, messages.mean(exchanged.messages))
    messages.settle(exchanged, box.name)
    names = ", ".join(name for name, _, _ in exchanged.messages)
    print(f"event {event} has {names} | loss {loss:.3f}", flush=True)
    event += 1
  inner.write_leaves(theta)


def main(argv=None):
  """Takes part in the run that the command line names."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  for name in "config checkpoint tokens mailbox secret replica".split():
    parser.add_argument(f"--{name}", required=True)
  parser.add_argument("--save", help="folder for the trained checkpoint")
  parser.add_argument("--device", default="cpu", help="cpu, cuda or mps")
  args = parser.parse_args(argv)
  terms = dx.mailbox_terms(json.loads(pathlib.Path(args.config).read_text()))
  terms.check_computed(COMPUTED)
  corpus = map_corpus(args.tokens)
  box = dx.Mailbox(
    args.mailbox,
    name=args.replica,
    secret=args.secret,
    config=terms.config,
    text_digest=corpus.digest,
    rules=terms.rules,
  )
  inner = InnerSteps(args.checkpoint, terms.fields, corpus.train, args.device)
  first_leaves = inner.read_leaves()
  while True:
    try:
      train(box, inner, terms, first_leaves)
      break
    except dx.ReplicaStaleError as error:
      print(f"beginning again: {error}", flush=True)
  if args.save:
    inner.module.save_pretrained(args.save)


if __name__ == "__main__":
  try:
    main()
  except (ValueError, OSError, dx.StoppedError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
