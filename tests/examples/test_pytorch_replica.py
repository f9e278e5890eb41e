"""A replica in PyTorch trains beside two replicas in JAX.

PyTorch is in the environment of `make check-transformers`.
"""

import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

import dilocox_jax as dx
from dilocox_jax.checks import flat
from dilocox_jax.data.shards import map_corpus
from dilocox_jax.models import weights
from dilocox_jax.models.transformer import build_model
from dilocox_jax.trees import leaves_by_path
from tests.api.conftest import no_pictures  # noqa: F401
from tests.examples import pytorch_runs

pytest.importorskip("torch", reason="needs torch (CPU)")
pytest.importorskip("transformers")
# Final losses (nats a token) may differ by this much. A replica in PyTorch has
# another order of the data, as runs with other seeds have.
SPREAD = 0.1


@pytest.fixture(scope="module", name="inputs")
def inputs_fixture(tmp_path_factory):
  folder = tmp_path_factory.mktemp("inputs")
  pytorch_runs.write_inputs(folder)
  return folder


@pytest.fixture(scope="module", name="example")
def example_fixture():
  return pytorch_runs.load_example()


@pytest.mark.parametrize("codec", pytorch_runs.CODECS)
def test_it_trains_as_a_replica_in_jax_does(
  inputs, example, codec, tmp_path, monkeypatch
):
  config = pytorch_runs.config_of(inputs, codec)
  gaps = pytorch_runs.record_gaps(monkeypatch)
  mixed = tmp_path / "mixed"
  loss = pytorch_runs.train_three(inputs, mixed, config, example)
  assert pytorch_runs.members(mixed) == [sorted(pytorch_runs.NAMES)] * 4
  assert gaps.num_compared and gaps.largest < gaps.tolerance
  assert pytorch_runs.largest_difference(mixed) < gaps.tolerance
  jax_loss = pytorch_runs.train_three(inputs, tmp_path / "jax", config, None)
  assert loss == pytest.approx(jax_loss, abs=SPREAD)
  assert loss < math.log(256) - 1  # A model that knows nothing has ln 256.


def test_the_model_is_that_of_jax(inputs, example):
  config = pytorch_runs.config_of(inputs, "float32")
  fields = {
    **flat(config.to_mapping()),
    "data.batch_size": 2,
    "mesh.num_replicas": 1,
  }
  tokens = np.arange(2 * 33) * 7 % 256
  inner = example.InnerSteps(inputs / "start", fields, tokens, "cpu")
  leaves = inner.read_leaves()
  inner.write_leaves({path: 2 * leaf for path, leaf in leaves.items()})
  for path, leaf in inner.read_leaves().items():
    np.testing.assert_array_equal(leaf, 2 * leaves[path])
  inner.write_leaves(leaves)
  _, params = weights.read_checkpoint(inputs / "start")
  for path, leaf in leaves_by_path(params).items():
    np.testing.assert_array_equal(leaf, leaves[path])
  apply = jax.jit(build_model(config.model.shape).apply)
  sequences = tokens.reshape(2, 33)
  logits = np.asarray(apply(params, sequences[:, :-1]), np.float64)
  targets = np.take_along_axis(logits, sequences[:, 1:, None], axis=-1)
  losses = np.log(np.exp(logits).sum(-1)) - targets[..., 0]
  assert inner.take([0], seat=0) == pytest.approx(losses.mean(), abs=1e-4)


def test_another_plan_is_one_line_that_names_the_field(
  inputs, example, tmp_path
):
  config = pytorch_runs.config_of(inputs, "float32").to_mapping()

  def arguments(config):
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(config))
    return pytorch_runs.arguments(inputs, tmp_path, config=path)

  unknown = {**config, "sync": {**config["sync"], "method": "overlap_loco"}}
  command = [sys.executable, str(pytorch_runs.EXAMPLE), *arguments(unknown)]
  result = subprocess.run(
    command, cwd=pytorch_runs.ROOT, capture_output=True, text=True
  )
  assert result.returncode == 2
  assert result.stderr.splitlines()[-1] == (
    "error: config.sync.method is 'overlap_loco' in this run, and this program"
    " computes only 'diloco'"
  )
  assert "Traceback" not in result.stderr
  assert not (tmp_path / "place").exists()

  terms = dx.mailbox_terms(config)
  dx.Mailbox(
    tmp_path / "place",
    name="oslo",
    secret=inputs / "run.secret",
    config=terms.config,
    rules=terms.rules,
    text_digest=map_corpus(str(inputs / "tokens")).digest,
  )
  other = {**config, "inner": {**config["inner"], "learning_rate": 0.5}}
  with pytest.raises(ValueError) as refused:
    example.main(arguments(other))
  line = str(refused.value)
  assert line.startswith("config.inner.learning_rate is 0.5 here and 0.004 in")
  assert "\n" not in line


def test_the_example_is_short():
  assert len(pytorch_runs.EXAMPLE.read_text().splitlines()) <= 200
