"""What works with the core alone, without any extra of setup.py."""

import json
import pathlib
import subprocess
import sys

import pytest

import dilocox_jax as dx

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Packages of extras. absl and ml_collections belong to `experiments`; absl is
# not among these, because optax and chex import it.
EXTRAS = (
  "flax",
  "grain",
  "markdown_it",
  "matplotlib",
  "ml_collections",
  "obstore",
  "orbax",
  "rich",
  "safetensors",
  "tensorboardX",
  "tokenizers",
  "wandb",
)
# Names that train, report or estimate runs of a config.
NEED_TRAIN = {
  "FinishedRound",
  "LossModel",
  "MailboxAddress",
  "Model",
  "TrainingStoppedError",
  "compare_methods",
  "estimate",
  "growing_plans",
  "load",
  "train",
}
WITHOUT_EXTRAS = f"""
import json, sys
for package in {EXTRAS}:
  sys.modules[package] = None
import dilocox_jax as dx
messages = {{}}
for name in dx.__all__:
  try:
    getattr(dx, name)
  except ImportError as error:
    messages[name] = str(error)
try:
  dx.Mailbox("s3://bucket/run", name="a", secret=b"0" * 32, config={{}})
except ValueError as error:
  messages["bucket"] = str(error)
print(json.dumps(messages))
"""


@pytest.fixture(scope="module", name="messages")
def messages_fixture():
  """Messages of the names that cannot be loaded without extras, by name."""
  command = [sys.executable, "-c", WITHOUT_EXTRAS]
  return json.loads(subprocess.check_output(command, cwd=ROOT))


def test_methods_rounds_and_mailboxes_need_no_extra(messages):
  assert set(messages) - {"bucket"} == NEED_TRAIN


def test_a_missing_extra_is_named_in_one_line(messages):
  for name in NEED_TRAIN:
    assert messages[name].startswith(f"dilocox_jax.{name} needs the package ")
    assert messages[name].endswith(": pip install 'dilocox_jax[train]'")
  assert messages["bucket"] == (
    "cannot open s3://bucket/run: a bucket needs the package obstore: "
    "pip install 'dilocox_jax[mailbox]'"
  )
  assert not [text for text in messages.values() if "\n" in text]


def test_another_missing_module_is_not_taken_for_an_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "dilocox_jax.aggregators.sizes", None)
  with pytest.raises(ModuleNotFoundError, match="import of dilocox_jax"):
    _ = dx.encoded_bytes
