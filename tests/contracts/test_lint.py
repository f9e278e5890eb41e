import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.tiers import slow

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
  "tool",
  [
    ["ruff", "check", "."],
    ["ruff", "format", "--diff", "."],
    ["pyrefly", "check", "--python-interpreter-path", sys.executable],
    *slow(["pyright", "--pythonpath", sys.executable]),
  ],
  ids=["ruff", "format", "pyrefly", "pyright"],
)
def test_the_tree_passes(tool):
  result = subprocess.run(
    [sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True
  )
  if result.returncode:
    pytest.fail(result.stdout + result.stderr, pytrace=False)


def test_no_file_names_a_machine_or_an_index():
  # Written so that this file does not match itself.
  wrong = rb"--(?:extra-)?index[-]url|--find[-]links"
  wrong += rb"|(?<![\w.])/(?:root|work|home)[/]\w"
  listed = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
  )
  names = [
    name for name in listed.stdout.split("\0") if (ROOT / name).is_file()
  ]
  texts = {name: (ROOT / name).read_bytes() for name in names}
  assert not [name for name, text in texts.items() if re.search(wrong, text)]


# What states the precision of its products does not notice when those of a
# process round as on an accelerator (`tests.rounded_products`).
ROUNDED = [
  *("tests/codecs", "tests/aggregators", "tests/test_optimizers.py"),
  "tests/reference/test_parts.py",
  "tests/outer/test_methods.py",
]


_SUM = """
import jax, numpy, tests.conftest
x = jax.random.normal(jax.random.key(0), (64, 64))
found = [
  jax.jit(lambda x: jax.numpy.dot(x, x, precision=precision))(x)
  for precision in (None, "high", "highest")
]
wide = numpy.asarray(x, numpy.float64)
print(*(numpy.max(numpy.abs(each - wide @ wide)) for each in found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "default", "high"), [("tf32", 1e-2, 1e-2), ("bf16", 0.08, 1e-4)]
)
def test_nothing_relies_on_exact_products_without_saying_so(
  kind, default, high
):
  def run(*arguments):
    done = subprocess.run(
      [sys.executable, *arguments],
      env=os.environ | {"DILOCOX_JAX_PRODUCTS": kind},
      **{"cwd": ROOT, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout

  errors = [float(number) for number in run("-c", _SUM).split()]
  assert errors[:2] == pytest.approx([default, high], rel=0.5)
  assert errors[2] < 2e-5
  run("-m", "pytest", "-q", "-p", "no:xdist", *ROUNDED)
