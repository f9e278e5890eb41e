"""Models and data of any kind are trained, killed and resumed to the bit."""

import dataclasses
import functools
import itertools
import json
import logging
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import dilocox_jax as dx
from dilocox_jax.data.feeds import as_feed
from dilocox_jax.models.custom import as_loss_model
from dilocox_jax.training import build
from dilocox_jax.training.trainer import Trainer
from tests import runs
from tests.data.data_sets import DataSet
from tests.tiers import slow

SIZE = 16
CLASSES = 5
STEPS = 24
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, CLASSES, 400)
IMAGES = RNG.normal(size=(400, 4, 4)).astype(np.float32)
IMAGES[np.arange(400), LABELS % 4, LABELS // 4] += 3.0
EXAMPLES = {"image": IMAGES, "label": LABELS}
TOKENS = np.arange(4000) % CLASSES


def loss(model, batch):
  logits = model(batch["image"].reshape(-1, SIZE))
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, batch["label"]
  ).mean()


class Words(nnx.Module):
  def __init__(self, rngs, depth=1):
    self.embed = nnx.Embed(CLASSES, SIZE, rngs=rngs)
    self.layers = nnx.List(
      [nnx.Linear(SIZE, SIZE, rngs=rngs) for _ in range(depth)]
    )
    self.head = nnx.Linear(SIZE, CLASSES, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens)
    for layer in self.layers:
      x = x + nnx.tanh(layer(x))
    return self.head(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
  """A module that is a tree itself, as those of Equinox are."""

  weights: list[Any]
  seen: Any

  def __call__(self, x):
    return jnp.tanh(x @ self.weights[0]) @ self.weights[1]


def tree():
  shapes = ((SIZE, 8), (8, CLASSES))
  drawn = np.random.default_rng(1)
  made = [jnp.asarray(drawn.normal(size=s) / 4, "float32") for s in shapes]
  return Tree(made, 3)


def pair():
  def init(key):
    return {"w": 0.1 * jax.random.normal(key, (SIZE, CLASSES))}

  return init, lambda params, x: x @ params["w"]


def rows(ids):
  return jax.tree.map(lambda leaf: leaf[ids], EXAMPLES)


def called(replica, step):
  return rows((8 * step + np.arange(8) + 100 * replica) % 400)


def from_grain():
  return (
    grain.MapDataset.range(400)
    .map(lambda i: {k: v[i] for k, v in EXAMPLES.items()})
    .shuffle(seed=1)
    .repeat()
    .batch(8)
  )


class Loader:
  """Gives seven batches an epoch."""

  def __iter__(self):
    return (called(0, step) for step in range(7))


def loader():
  return Loader(), rows(np.arange(50))


@dataclasses.dataclass
class Kind:
  model: Any
  data: Any
  loss: Any = loss

  def train(self, workdir, method, **changes):
    return dx.train(
      self.model(),
      self.data(),
      loss=self.loss,
      method=method,
      replicas=2,
      steps=STEPS,
      workdir=workdir,
      config={
        "sync": {"sync_interval": 4, **SYNC[method]},
        "data": {"batch_size": 8, "sequence_length": 7},
        "inner": {"learning_rate": 0.05, "warmup_steps": 2},
        "checkpoint": {"interval_steps": 8},
        "evaluation": {"interval_steps": 8, "num_sequences": 16},
      },
      **changes,
    )


SLICES = {"num_fragments": 4}
SYNC = {
  **{"diloco": {}, "dilocox": {}, "overlap_loco": SLICES},
  "streaming_diloco": SLICES | {"overlap_steps": 2},
}
KINDS = {
  "built NNX, arrays of tokens": Kind(
    lambda: Words(nnx.Rngs(0)), lambda: (TOKENS, TOKENS[:400]), None
  ),
  "class of NNX, function": Kind(
    lambda: Words, lambda: lambda m, s: TOKENS[m + s :][:64].reshape(8, 8), None
  ),
  "linen, arrays of images": Kind(
    lambda: linen.Dense(CLASSES), lambda: (EXAMPLES, rows(np.arange(50)))
  ),
  "pair, grain": Kind(pair, from_grain),
  "tree, loader": Kind(tree, loader),
}
FIRST = ["diloco", "dilocox", "diloco", "streaming_diloco", "overlap_loco"]
FAST = list(zip(KINDS, FIRST, strict=True))
OTHERS = [cell for cell in itertools.product(KINDS, SYNC) if cell not in FAST]


@pytest.mark.parametrize(("name", "method"), [*FAST, *slow(*OTHERS)])
def test_it_trains_and_goes_on_to_the_same_bits(
  name, method, tmp_path, monkeypatch, caplog
):
  runs.share_programs(monkeypatch)
  kind = KINDS[name]
  with caplog.at_level(logging.INFO, "dilocox_jax"):
    whole = kind.train(tmp_path / "whole", method)
  said = caplog.text
  first, *_, last = whole.metrics.evaluations
  assert last.outer_loss < 0.8 * first.outer_loss
  assert whole.loss == last.outer_loss and whole.sent_bytes > 0
  with monkeypatch.context() as patch, pytest.raises(runs.Killed):
    patch.setattr(Trainer, "_dispatch", runs.killed(16))
    kind.train(tmp_path / "killed", method)
  resumed = kind.train(tmp_path / "killed", method)
  runs.assert_same_bits(resumed.params, whole.params)
  assert runs.metrics_text(tmp_path / "killed") == runs.metrics_text(
    tmp_path / "whole"
  )
  assert ("begins again" in said) == (kind.data is loader)
  tokens = {row.tokens / row.step for row in whole.metrics.rounds}
  assert tokens == {2 * 8 * (7 if kind.loss is None else 1)}
  model = whole.model
  if not name.startswith("pair") and kind.loss:
    batch = rows(np.arange(16) * 50 // 16)  # What is evaluated.
    assert kind.loss(model, batch) == pytest.approx(whole.loss, rel=1e-5)
  elif kind.loss is None:
    assert model(TOKENS[None, :5]).shape == (1, 5, CLASSES)
  assert dx.load(
    whole.workdir, model=kind.model(), loss=kind.loss, data=kind.data()
  ).params


def test_a_simulated_clock_times_the_bytes_of_the_model(tmp_path):
  kind = KINDS["pair, grain"]
  given = {"cluster": "100mbit", "step_s": 0.25}
  run = kind.train(tmp_path, "streaming_diloco", **given)
  hours = list(run.metrics.simulated_s.values())[-1]
  exposed = hours - STEPS * 0.25
  assert 0 < exposed and run.sent_bytes < 4 * SIZE * CLASSES * STEPS


class Counted:
  """Batches whose position is saved as `kind` says."""

  def __init__(self, kind):
    self.at = self.drawn = 0
    if kind == "bytes":
      self.get_state = lambda: str(self.at).encode()
      self.set_state = lambda state: setattr(self, "at", int(state))
    if kind == "dictionary":
      self.state_dict = lambda: {"at": self.at}
      self.load_state_dict = lambda state: setattr(self, "at", state["at"])

  def __iter__(self):
    return self

  def __next__(self):
    self.at = self.at + 1
    self.drawn = self.drawn + 1
    return called(0, self.at)


@pytest.mark.parametrize("kind", ["bytes", "dictionary", "none", "grain"])
def test_an_iterator_with_a_state_goes_on_from_it(kind, caplog):
  def streams():
    is_grain = kind == "grain"
    source: Any = from_grain().to_iter_dataset() if is_grain else Counted(kind)
    feed: Any = as_feed((source, rows(np.arange(50))))
    return source, feed.streams(2, 8, 0)

  _, first = streams()
  first.take(3)
  saved = json.loads(json.dumps(first.get_state()))
  source, again = streams()
  again.set_state(saved)
  np.testing.assert_array_equal(again.take(2)["image"], first.take(2)["image"])
  assert caplog.text.count("has no state to save") == 2 * (kind == "none")
  if kind != "grain":
    assert source.drawn == (10 if kind == "none" else 1 + 4)


class Loading:
  """An iterator with the state of a usual loader, which is checked."""

  def __init__(self):
    self.at = 0
    self.random = np.random.default_rng(0)

  def __iter__(self):
    return self

  def __next__(self):
    self.at += 1
    self.random.integers(10)
    return called(0, self.at)

  def state_dict(self):
    return {
      "at": np.int64(self.at),
      "epochs": {0: (self.at, None)},
      "random": self.random.bit_generator.state,
      "worker": {"position": bytes([self.at])},
    }

  def load_state_dict(self, state):
    self.at = int(state["at"])
    self.random.bit_generator.state = state["random"]
    expected = self.state_dict()
    assert type(state["at"]) is np.int64
    assert {**state, "at": 0} == {**expected, "at": 0}


def trained_on(data, workdir, steps=8):
  return dx.train(
    pair(),
    data,
    loss=loss,
    method="diloco",
    replicas=2,
    steps=steps,
    workdir=workdir,
    config={
      "sync": {"sync_interval": 2},
      "checkpoint": {"interval_steps": 2},
      "evaluation": {"num_sequences": 16},
    },
  )


def test_a_loaders_state_is_in_the_checkpoint_as_it_was(tmp_path, monkeypatch):
  whole = trained_on(Loading(), tmp_path / "whole")
  with monkeypatch.context() as patch, pytest.raises(runs.Killed):
    patch.setattr(Trainer, "_dispatch", runs.killed(4))
    trained_on(Loading(), tmp_path / "killed")
  source = Loading()
  resumed = trained_on(source, tmp_path / "killed")
  runs.assert_same_bits(resumed.params, whole.params)
  assert source.at == 2 + 2 * 8  # Two batches are held out.


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(
  tmp_path,
):
  class Own(Loading):
    def state_dict(self):
      return {"epochs": [self.random]}

  line = r"the state of Own cannot be saved: state\['epochs'\]\[0\] is a numpy"
  with pytest.raises(ValueError, match=line):
    trained_on(Own(), tmp_path)
  assert not list(tmp_path.iterdir())


FEW = np.ones((3, 2))


def of_shapes(*sizes):
  return (np.ones((size, 3), np.int32) for size in sizes)


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (of_shapes(2, 2, 2, 2, 2), "ended after 5 batches, and the run needs more"),
    (of_shapes(2, 2, 2, 1), r"1 has int32\[1, 3\] .* int32\[2, 3\]: all"),
    (lambda m, s: np.ones((1 + s, 2)), "batch 1 of replica 0 has float32.2, 2"),
    (iter(["a"]), "only numbers can be trained on"),
    (iter([3]), "without an axis of examples"),
    (({"a": np.ones(3), "b": np.ones(2)}, np.ones(2)), "have 2 and 3 rows"),
    ((FEW, FEW), "3 examples are less than a batch of 4"),
  ],
)
def test_data_that_do_not_fit_are_refused_in_one_line(data, message):
  with pytest.raises((TypeError, ValueError), match=message) as raised:
    feed: Any = as_feed(data)
    feed.example()
    feed.streams(2, 4, 0).take(4)
  assert "\n" not in str(raised.value)


class LinenWords(linen.Module):
  """A model of linen whose positions have parameters, too."""

  @linen.compact
  def __call__(self, tokens):
    x = linen.Embed(CLASSES, SIZE)(tokens)
    shape = (tokens.shape[1], SIZE)
    x = x + self.param("positions", linen.initializers.zeros, shape)[None]
    return linen.Dense(CLASSES)(x)


def drawn_by_jax(replica, step):
  key = jax.random.fold_in(jax.random.key(replica), step)
  return jax.random.randint(key, (2, 7), 0, CLASSES)


@pytest.mark.parametrize("has_validation", [False, True])
def test_a_function_is_called_outside_of_traces_and_once_for_a_batch(
  has_validation, tmp_path
):
  calls = []

  def batch(replica, step):
    found = np.asarray(drawn_by_jax(replica, step))  # Fails under a trace.
    calls.append((replica, step))
    return found

  data = (batch, drawn_by_jax) if has_validation else batch
  run = dx.train(
    LinenWords(),
    data,
    method="diloco",
    replicas=2,
    steps=4,
    workdir=tmp_path,
    config={"sync": {"sync_interval": 2}, "evaluation": {"num_sequences": 4}},
  )
  assert run.params["positions"].shape == (6, SIZE)
  assert len(calls) == len(set(calls)) == 2 * 4 + 2 * (not has_validation)


def test_a_module_of_linen_is_made_for_sequences_of_the_config(tmp_path):
  config = {
    "sync": {"sync_interval": 2},
    "data": {"batch_size": 2, "sequence_length": 7},
    "evaluation": {"num_sequences": 2},
  }
  run = dx.train(
    LinenWords(),
    (TOKENS, TOKENS[:400]),
    method="diloco",
    replicas=2,
    steps=2,
    workdir=tmp_path,
    config=config,
  )
  assert run.params["positions"].shape == (7, SIZE)
  again = dx.load(tmp_path, model=LinenWords())
  runs.assert_same_bits(again.params, run.params)


def test_a_function_may_fill_its_array_again():
  buffer = np.zeros((2, 3), np.int32)

  def batch(replica, step):
    buffer[:] = 10 * replica + step
    return buffer

  feed: Any = as_feed(batch)
  (held,) = feed.held_out(8, 4)
  assert held[:, 0, 0].tolist() == [0, 1]
  assert feed.example()[0, 0] == 0
  taken = feed.streams(2, 8, 0).take(3)
  assert taken[..., 0, 0].tolist() == [[2, 3, 4], [12, 13, 14]]


def test_replicas_take_turns_and_what_is_held_out_is_not_trained_on():
  feed: Any = as_feed(np.full((2, 3), n) for n in itertools.count())
  (held,) = feed.held_out(8, 5)
  assert held[:, 0, 0].tolist() == [0, 1, 2]
  streams = feed.streams(2, 8, 0)
  assert streams.take(2)[..., 0, 0].tolist() == [[3, 5], [4, 6]]
  assert streams.take(1, [1])[..., 0, 0].tolist() == [[8]]
  streams.set_state(streams.get_state() | {"step": 1})  # No batch comes twice.
  assert streams.take(1, [1])[..., 0, 0].tolist() == [[10]]


SEQUENCES = jnp.arange(20, dtype=np.int32).reshape(2, 10) % CLASSES


def test_the_loss_of_a_module_is_its_cross_entropy():
  deep = functools.partial(Words, depth=12)  # More layers than digits.
  model = as_loss_model(deep)
  keys = jax.random.split(jax.random.key(0), 2)
  for key, other in (keys, keys[::-1]):
    logits = deep(nnx.Rngs(key))(SEQUENCES[:, :-1])
    expected = optax.softmax_cross_entropy_with_integer_labels(
      logits, SEQUENCES[:, 1:]
    ).mean()
    found = model.loss(model.init(key), SEQUENCES)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert abs(model.loss(model.init(other), SEQUENCES) - expected) > 1e-3


class WithState(nnx.Module):
  def __init__(self, rngs):
    self.drop = nnx.Dropout(0.1, rngs=rngs)


class WithMeans(linen.Module):
  @linen.compact
  def __call__(self, tokens):
    x = linen.Embed(CLASSES, SIZE)(tokens)
    return linen.BatchNorm(use_running_average=False)(x)


@pytest.mark.parametrize("module", [WithState, WithMeans()])
def test_state_that_is_no_parameter_is_refused(module):
  with pytest.raises(ValueError, match="state that is no parameter") as error:
    as_loss_model(module)
  assert "\n" not in str(error.value)


# Token ids beyond what the model knows.


class Narrow(nnx.Module):
  """Embeds ten tokens, and has logits of five."""

  def __init__(self, rngs, rows=2 * CLASSES):
    self.embed = nnx.Embed(rows, SIZE, rngs=rngs)
    self.head = nnx.Linear(SIZE, CLASSES, rngs=rngs)

  def __call__(self, tokens):
    return self.head(self.embed(tokens))


BEYOND = TOKENS + (np.arange(4000) == 3999)  # The last of all is 5.
ROWS = BEYOND.reshape(-1, 8)


def streamed(tokens):
  while True:
    yield tokens[:16].reshape(2, 8)


def small_train(workdir, model, data, **changes):
  return dx.train(
    model,
    data,
    method="diloco",
    replicas=2,
    steps=4,
    workdir=workdir,
    config={
      "sync": {"sync_interval": 2},
      "data": {"batch_size": 2, "sequence_length": 7},
      "evaluation": {"num_sequences": 4},
    },
    **changes,
  )


@pytest.mark.parametrize(
  ("model", "data", "message"),
  [
    (Words, (BEYOND, TOKENS), "has 6 different tokens, but the model, which h"),
    (Narrow, (BEYOND, TOKENS), "which has 5 logits a token, has only 5"),
    (
      functools.partial(Narrow, rows=3),
      (TOKENS, TOKENS),
      "has 5 different tokens, but the model, whose embedding has 3 rows, has",
    ),
    (Words, None, "the text 'stdlib' has 256 different tokens, but the model"),
    (
      Words,
      (TOKENS.reshape(-1, 8), ROWS[::-1]),
      "tokens of validation go from 0 to 5",
    ),
    (Words, ({"input_ids": ROWS}, {"input_ids": ROWS}), "go from 0 to 5"),
    (Words, streamed(TOKENS + 1), "tokens of training go from 1 to 5"),
    (Words, streamed(TOKENS - 1), "tokens of training go from -1 to 3"),
    (
      None,
      (np.int32(ROWS + 251), ROWS),
      "model.vocab_size=256 allows 0 to 255",
    ),
    (Words, (TOKENS + 0.5, TOKENS), r"a training batch is float"),
    (Words, ({"image": IMAGES}, {"image": IMAGES}), "has image and no input_i"),
    (Words, (IMAGES, IMAGES), r"is float32\[2, 4, 4\]: without loss="),
    (
      lambda rngs: nnx.Embed(CLASSES, 3, rngs=rngs),
      (TOKENS, TOKENS),
      "has 3 lo",
    ),
  ],
)
def test_token_ids_are_checked_before_anything_is_compiled(
  model, data, message, tmp_path, monkeypatch
):
  def compiled(*given, **options):
    raise AssertionError("programs are built")

  monkeypatch.setattr(build, "programs", compiled)
  with pytest.raises(ValueError, match=message) as raised:
    small_train(tmp_path, model, data)
  assert "\n" not in str(raised.value)


def test_a_token_that_comes_later_stops_the_run_in_one_line(tmp_path):
  def late(replica, step):
    return np.full((2, 8), 1 + 5 * (step >= 5))

  with pytest.raises(ValueError, match="a training batch go from 1 to 6, but"):
    small_train(tmp_path, Words, late)


def test_a_data_set_with_input_ids_trains_as_its_array_does(tmp_path, caplog):
  rows = TOKENS[:1600].reshape(-1, 8)
  packed = DataSet({"input_ids": rows.tolist(), "text": ["a"] * len(rows)})
  with caplog.at_level(logging.INFO, "dilocox_jax"):
    named = small_train(
      tmp_path / "a", Words, {"train": packed, "test": packed}
    )
  plain = small_train(tmp_path / "b", Words, (rows, rows))
  runs.assert_same_bits(named.params, plain.params)
  assert named.metrics.tokens == 2 * 4 * 2 * 7
  assert "200 rows of 8 tokens (columns not read: text)" in caplog.text


def test_lists_of_numbers_are_arrays():
  text: Any = as_feed((TOKENS.tolist(), TOKENS[:99].tolist()))
  np.testing.assert_array_equal(text.train, TOKENS)
  assert text.vocab_size == CLASSES
