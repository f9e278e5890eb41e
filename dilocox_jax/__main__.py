"""Prints the version, the devices, the installed extras and how to begin.

python -m dilocox_jax
"""

import importlib.metadata
import importlib.util
import pathlib
import platform

import jax

import dilocox_jax as dx

_ROOT = pathlib.Path(dx.__file__).parents[1]
# One package of each extra, by which one sees whether the extra is installed.
_PACKAGE_OF_EXTRA = {
  "train": "orbax",
  "mailbox": "obstore",
  "text": "tokenizers",
  "weights": "safetensors",
}
_BEGIN = """\
Begin:
  in your own loop     dilocox_jax.diloco(optax.adamw(3e-4), sync_interval=32)
  a complete run       dilocox_jax.train(method="diloco", steps=200)
  what there is        help(dilocox_jax.diloco), dir(dilocox_jax)"""
_PROGRAMS = """\
  programs             python -m experiments
  a first comparison   make quickstart"""


def describe() -> str:
  """Returns version, devices, installed extras and first steps as text."""
  lines = [
    f"dilocox_jax {dx.__version__} (Python {platform.python_version()}, "
    f"JAX {importlib.metadata.version('jax')})",
    f"Devices: {_devices()}",
    f"Extras: {_extras()}",
    "",
    _BEGIN,
  ]
  if (_ROOT / "experiments").is_dir():
    lines.append(_PROGRAMS)
  return "\n".join(lines)


def _devices() -> str:
  """Returns how many devices of each kind JAX finds, e.g. "8 cpu".

  Without devices, the text is "none" and the reason.
  """
  try:
    devices = jax.devices()
  except RuntimeError as error:
    return f"none ({str(error).splitlines()[0]})"
  kinds = [device.device_kind for device in devices]
  return ", ".join(
    f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)
  )


def _extras() -> str:
  """Names the installed extras, and how to install the others."""
  missing = [
    extra
    for extra, package in _PACKAGE_OF_EXTRA.items()
    if importlib.util.find_spec(package) is None
  ]
  installed = [extra for extra in _PACKAGE_OF_EXTRA if extra not in missing]
  text = ", ".join(installed) or "none"
  if missing:
    text += f" (for others: pip install 'dilocox_jax[{','.join(missing)}]')"
  return text


if __name__ == "__main__":
  print(describe())
