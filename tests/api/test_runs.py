import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import dilocox_jax as dx
from dilocox_jax.aggregators.exchange import mean_of_finite_replicas
from dilocox_jax.api import runs as api_runs
from dilocox_jax.metrics import work_directory
from dilocox_jax.report.units import human_bytes
from dilocox_jax.training.checkpoint import RefusedError
from tests import runs

VOCAB_SIZE = 11


def bigrams():
  """A model that predicts a token from the one before it: one matrix."""

  def loss(params, tokens):
    logits = params["table"][tokens[:, :-1]]
    return jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    )

  def init(key):
    return {
      "table": 0.1 * jax.random.normal(key, (VOCAB_SIZE, VOCAB_SIZE)),
      "adapter": jnp.zeros((VOCAB_SIZE, 0)),
    }

  return dx.LossModel(init, loss)


def counting():
  """Tokens that count: 0, 1, ..., 10, 0, 1, ..."""
  tokens = (np.arange(20_000) % VOCAB_SIZE).astype(np.uint8)
  return dx.Corpus("counting", tokens, tokens[:2000], "0" * 16, VOCAB_SIZE, 0)


def settings(**changes):
  exchange = {"codec": "int(bits=4)"}
  return runs.settings(total_steps=30, exchange=exchange, **changes)


OVERRIDES = {
  "model": bigrams(),
  "data": counting(),
  "inner_optimizer": optax.sgd(20.0),
  "outer_optimizer": optax.sgd(1.0),
}


def train(workdir, config=None, **changes):
  given: dict[str, Any] = {
    "config": config or settings(),
    **OVERRIDES,
    **changes,
  }
  return dx.train(workdir=workdir, **given)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return train(tmp_path_factory.mktemp("run"))


def test_a_model_data_and_optimizers_of_ones_own_are_trained(run):
  first, *_, last = run.metrics.evaluations
  assert last.outer_loss < 0.1 < first.outer_loss
  assert run.params["table"].shape == (VOCAB_SIZE, VOCAB_SIZE)
  logits = np.asarray(run.params["table"])
  np.testing.assert_array_equal(
    logits.argmax(1), (np.arange(VOCAB_SIZE) + 1) % VOCAB_SIZE
  )


def test_runs_and_corpora_are_shown_on_one_line(run, tmp_path):
  sent = human_bytes(run.metrics.total_sent_bytes)
  for word in ("Run(dilocox, 30 steps", "loss ", f"{sent} sent"):
    assert word in repr(run)
  assert f"<td>{sent}</td>" in run._repr_html_()
  shown = [run, run.metrics, run.config, counting(), dx.load(run.workdir)]
  assert not any("\n" in repr(each) or len(repr(each)) > 250 for each in shown)
  rows = list(run.metrics)
  assert len(rows) == len(run.metrics.rounds) + len(run.metrics.evaluations)
  assert repr(api_runs.Run(tmp_path)) == f"Run({tmp_path})"


def test_a_run_is_recorded_and_read_back_with_its_own_parts_alone(run):
  record = json.loads((run.workdir / "run.json").read_text())
  assert record["overrides"] == list(OVERRIDES)
  assert record["parameter_count"] == VOCAB_SIZE**2
  assert record["corpus_name"] == "counting"
  # 121 values in 4 bits are 61 bytes; a scale has 2; 1 says who takes part.
  (sent,) = {row.sent_bytes for row in run.metrics.rounds[1:]}
  assert sent == 64
  assert all(np.isnan(row.learning_rate) for row in run.metrics.rounds)
  overrides: dict[str, Any] = {
    k: part for k, part in OVERRIDES.items() if k != "data"
  }
  loaded = dx.load(run.workdir, **overrides)
  assert loaded.config == settings() and loaded.metrics.finished
  runs.assert_same_bits(loaded.params, run.params)
  with pytest.raises(RefusedError, match="pass the same"):
    _ = dx.load(run.workdir).params
  with pytest.raises(RefusedError, match="a run with other overrides"):
    train(run.workdir, outer_optimizer=None)


def test_a_directory_trains_one_run_at_a_time(run, tmp_path):
  with work_directory.held(tmp_path):
    with pytest.raises(
      work_directory.BusyError, match="another run is at work in w"
    ):
      train(tmp_path)
  found = {each.name for each in tmp_path.iterdir()}
  assert found == {".train.lock", "made_by.json"}
  again = train(run.workdir)
  assert again.metrics.evaluations[-1].step == 30


def test_a_run_starts_from_one_with_overrides(run, tmp_path):
  config = settings(checkpoint={"init_from": str(run.workdir)})
  (tmp_path / "new").mkdir()
  new = train(tmp_path / "new", config)
  first = new.metrics.rounds[0].loss
  assert first < run.metrics.rounds[0].loss / 10
  message = "to which inner_optimizer was passed in: pass the same"
  with pytest.raises(RefusedError, match=message):
    train(tmp_path / "lacking", config, inner_optimizer=None)


def test_an_exchange_of_ones_own_averages_where_nobody_is_away(tmp_path):
  calls = []
  plain = mean_of_finite_replicas()

  def average(values, state, params):
    assert jax.tree.structure(params) == jax.tree.structure(values)
    calls.append(params)
    return plain.average(values, state, params)

  exchange = plain._replace(average=average)
  train(tmp_path / "all", exchange=exchange)
  assert calls
  away = runs.settings(method="diloco").to_mapping()
  away["membership"]["absences"] = "1:1"
  with pytest.raises(ValueError, match="does not go with membership.absences"):
    dx.train(config=away, workdir=tmp_path / "run", exchange=exchange)


def test_a_model_that_does_not_fit_is_refused_in_one_line(tmp_path):
  plain = bigrams()
  counter = {"count": jnp.int32(0)}
  model = plain._replace(init=lambda key: plain.init(key) | counter)
  with pytest.raises(ValueError, match="^.*leaf 'count' of type int32.*$"):
    train(tmp_path / "counter", model=model)
  cut: Any = {"mesh": {"num_stages": 2}, "inner": {"accumulate_steps": 2}}
  with pytest.raises(ValueError, match="^.*embed, block and logits.*$"):
    train(tmp_path / "cut", runs.settings(layout="mesh", **cut))


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ({"data": b"text"}, "data of type bytes must be a pair"),
    ({"data": (np.ones(8),)}, "must be a pair"),
    ({"data": (["a"], ["b"])}, "only numbers can be trained on"),
    ({"data": (np.ones((3, 2)), {})}, "there are no examples"),
    ({"inner_optimizer": "adamw"}, "inner_optimizer='adamw' must be an optax"),
    ({"outer_optimizer": 0.7}, "outer_optimizer=0.7 must be an optax"),
    ({"exchange": "int"}, "exchange='int' must be a dilocox_jax.Aggregator"),
    ({"config": 3}, "config=3 must be a dilocox"),
    ({"mailbox": ""}, "mailbox='' must be a dilocox_jax.MailboxAddress"),
    ({"method": "diloco"}, "config has a value for sync.method already"),
    ({"model": 3}, "a model of type int cannot be trained"),
    ({"model": linen.Dense}, "Dense is a class of linen: pass a module of it"),
    ({"model": None, "loss": max}, "needs a model that is passed in"),
    ({"cluster": "1gbit"}, "give step_s"),
  ],
)
def test_an_override_of_another_kind_is_refused(tmp_path, overrides, message):
  with pytest.raises((TypeError, ValueError), match=message) as raised:
    train(tmp_path / "run", **overrides)
  assert "\n" not in str(raised.value)
  assert not (tmp_path / "run").exists()


def test_an_estimate_needs_no_training_but_a_config():
  with pytest.raises(TypeError, match="config={} must be a dilocox"):
    dx.estimate({}, "two_workers")  # pyright: ignore
  with pytest.raises(TypeError, match="config={} must be a dilocox"):
    dx.compare_methods({}, "two_workers")  # pyright: ignore
  slow, fast = (
    dx.estimate(settings(), "100mbit", step_s=s) for s in (0.2, 0.1)
  )
  assert slow.sent_bytes == fast.sent_bytes > 0
  assert 0 < fast.total_s < slow.total_s
