"""What `python -m dilocox_jax` says."""

import importlib.util

import jax

import dilocox_jax as dx
from dilocox_jax.__main__ import describe


def test_the_module_says_version_devices_extras_and_where_to_begin(monkeypatch):
  text = describe()
  assert text.startswith(f"dilocox_jax {dx.__version__} (Python ")
  assert "\nDevices: 8 cpu\n" in text
  assert "\nExtras: train, mailbox, text, weights\n" in text
  assert "\n  programs             python -m experiments\n" in text
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util,
    "find_spec",
    lambda name: None if name == "obstore" else find_spec(name),
  )
  says = "train, text, weights (for others: pip install 'dilocox_jax[mailbox]')"
  assert f"\nExtras: {says}\n" in describe()


def test_a_machine_without_the_devices_that_are_asked_for_is_told(monkeypatch):
  def devices():
    raise RuntimeError("Unable to initialize backend 'cuda'\nmore")

  monkeypatch.setattr(jax, "devices", devices)
  says = "\nDevices: none (Unable to initialize backend 'cuda')\n"
  assert says in describe()
