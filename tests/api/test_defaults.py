"""No default takes the place of what was passed in."""

import json
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import dilocox_jax as dx
from dilocox_jax.config import to_plan
from dilocox_jax.data.tokenizers import byte_tokenizer
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.model.presets import nano
from dilocox_jax.training import build, start
from dilocox_jax.training.overrides import Overrides
from dilocox_jax.training.states import TrainingStoppedError
from experiments.runtime import samples
from tests import runs
from tests.report.conftest import write_run

TOKENS = np.arange(4000) % 16


class Words(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(16, 4, rngs=rngs)

  def __call__(self, tokens):
    return self.embed.attend(self.embed(tokens))


def train(workdir, model=Words, steps=2, **changes):
  config = {
    "sync": {"sync_interval": 2},
    "data": {"batch_size": 2, "sequence_length": 7},
    "evaluation": {"num_sequences": 2},
  }
  config |= changes.pop("config", {})
  given: dict[str, Any] = {
    "data": (TOKENS, TOKENS[:200]),
    "method": "diloco",
    "replicas": 2,
  }
  given |= changes
  return dx.train(model, workdir=workdir, steps=steps, config=config, **given)


@pytest.fixture(scope="module", name="run")
def run_fixture(tmp_path_factory):
  return train(tmp_path_factory.mktemp("run") / "words")


def test_a_run_on_tokens_is_not_sampled_as_another_text(run):
  text = dx.Corpus("own", TOKENS, TOKENS[:200], "0" * 16, 256, 0)
  for given in (None, text):
    with pytest.raises(ValueError, match="the text has no tokenizer"):
      samples.add_sample(run.workdir, 4, text=given)
  assert not (run.workdir / "sample.txt").exists()


@pytest.mark.parametrize(
  ("how", "line"),
  [
    ({"seed": 2**32}, "seed=4294967296 must be at least 0 and at most"),
    ({"seed": -1}, "seed=-1 must be at least 0"),
    ({"seed": 0.5}, "seed=0.5 must be of type int"),
    ({"prompt": b"text"}, "prompt=b'text' must be of type str"),
  ],
)
def test_how_a_sample_is_drawn_is_checked_first(tmp_path, how, line):
  with pytest.raises(ValueError, match=line):
    samples.add_sample(tmp_path, 4, **how)


def test_another_text_than_the_runs_is_refused(run):
  tokens = TOKENS.astype(np.uint8)
  text = dx.Corpus(
    "own", tokens, tokens, "0" * 16, 256, 0, tokenizer=byte_tokenizer()
  )
  with pytest.raises(ValueError, match="is not that of the run"):
    samples.add_sample(run.workdir, 4, text=text)


def test_a_text_whose_tokenizer_has_changed_is_not_the_runs(tmp_path):
  texts = tmp_path / "texts"
  texts.mkdir()
  for number in range(40):
    (texts / f"{number}.txt").write_text(f"some words, number {number} " * 9)
  text = {
    "source": "text_files",
    "glob": f"{texts}/*.txt",
    "tokenizer": "bpe",
    "vocab_size": 260,
  }
  config = runs.settings(data=text, total_steps=3, model={"vocab_size": 260})
  workdir = write_run(tmp_path / "run")
  (workdir / "config.json").write_text(json.dumps(config.to_mapping()))
  with pytest.raises(ValueError, match="is not that of the run"):
    samples.add_sample(workdir, 3)


def test_a_model_that_was_passed_in_is_not_exported_as_the_configs(
  run, tmp_path
):
  with pytest.raises(ValueError, match="has no form that other libraries read"):
    run.export(tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_a_model_that_was_passed_in_takes_no_weights_of_another(run, tmp_path):
  params = jax.tree.map(np.asarray, build_model(nano).init(jax.random.key(0)))
  config = {"checkpoint": {"init_from": str(run.workdir)}}
  line = "holds another model: its leaf 'embed/embedding' is"
  with (
    mock.patch.object(start, "_saved_model", return_value=(params, None)),
    pytest.raises(dx.RefusedError, match=line) as error,
  ):
    train(tmp_path / "run", config=config)
  assert "\n" not in str(error.value)


def test_a_model_that_was_passed_in_takes_none_of_another_library(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
  config = {"checkpoint": {"init_from": str(tmp_path)}}
  for trainable in (None, lambda path: True):
    with pytest.raises(dx.RefusedError, match="of another library") as error:
      train(tmp_path / "run", config=config, trainable=trainable)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("changes", "line"),
  [
    ({"loss": 0}, "loss=0 must be a function"),
    ({"loss": False}, "loss=False must be a function"),
    ({"step_s": 0.5}, "step_s=0.5 is of a cluster .* give cluster"),
    ({"cluster": "", "step_s": 0.5}, "cluster"),
    (
      {"model": None, "trainable": bool, "config": {"lora": {"rank": 2}}},
      "trainable and lora.rank=2 both say",
    ),
  ],
)
def test_what_would_be_passed_over_is_refused(changes, line, tmp_path):
  with pytest.raises((TypeError, ValueError), match=line) as error:
    train(tmp_path / "run", **changes)
  assert "\n" not in str(error.value)
  assert not (tmp_path / "run").exists()


class Silent(optax.GradientTransformation):
  """An optimizer that counts as false, as a container without entries does."""

  def __bool__(self):
    return False


def test_optimizers_that_count_as_false_are_used():
  optimizer = Silent(*optax.sgd(0.5))
  config = runs.settings()
  overrides = Overrides(inner_optimizer=optimizer, outer_optimizer=optimizer)
  assert runs.outer_step(config, overrides).optimizer is optimizer
  programs = build.programs(config, overrides)
  assert np.isnan(programs.schedule(0))
  assert programs.steps.optimizer is optimizer
  assert to_plan.traffic(config, {}).shapes == {}


def test_who_diverges_is_told_of_the_rates_that_were_used(tmp_path):
  with pytest.raises(TrainingStoppedError) as error:
    train(tmp_path, inner_optimizer=optax.sgd(np.inf), steps=4)
  line = str(error.value)
  assert "lower the rate of the inner optimizer that was passed in" in line
  assert "or outer.learning_rate=0.7" in line
