"""Codecs and optimizers hold what they promise on devices that round factors.

The tests of a folder run once more in a process of their own, in which products
round as on an accelerator (`tests.rounded_products`). What states its precision
does not notice.
"""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICK = ["tests/codecs/test_low_rank.py", "tests/test_inner_optimizer.py"]
THOROUGH = [
  "tests/codecs",
  "tests/aggregators",
  "tests/test_optimizers.py",
  "tests/reference/test_optimizers.py",
  "tests/outer/test_against_oracles.py",
  "tests/outer/test_reductions.py",
]
_SUM = """
import jax, numpy, tests.conftest
x = jax.random.normal(jax.random.key(0), (64, 64))
for precision in (None, "high", "highest"):
  with jax.default_matmul_precision(precision):
    found = jax.jit(lambda x: x @ x)(x)
  wide = numpy.asarray(x, numpy.float64)
  print(numpy.max(numpy.abs(found - wide @ wide)))
"""


def run(kind, *arguments):
  return subprocess.run(
    [sys.executable, *arguments],
    cwd=ROOT,
    env=os.environ | {"DILOCOX_JAX_PRODUCTS": kind},
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize(
  ("kind", "default", "high"), [("tf32", 1e-2, 1e-2), ("bf16", 0.08, 1e-4)]
)
def test_products_round_as_far_as_their_precision_allows(kind, default, high):
  errors = [float(line) for line in run(kind, "-c", _SUM).stdout.split()]
  np.testing.assert_allclose(errors[:2], [default, high], rtol=0.5)
  assert errors[2] < 2e-5


@pytest.mark.parametrize(
  "kind", ["bf16", pytest.param("tf32", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
  "paths",
  [QUICK, pytest.param(THOROUGH, marks=pytest.mark.slow)],
  ids=["quick", "thorough"],
)
def test_nothing_relies_on_exact_products_without_saying_so(kind, paths):
  options = ["-q", "-p", "no:xdist"]
  done = run(kind, "-m", "pytest", *options, *paths)
  assert done.returncode == 0, done.stdout[-3000:]
