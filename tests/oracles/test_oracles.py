"""The oracles themselves: numbers by hand, and what is known of them.

Scales of codecs are powers of two here, so that bfloat16 is exact.
"""

import functools
import json
import math
import pathlib

import numpy as np
import pytest

from dilocox_jax.codecs.named import named_codec
from dilocox_jax.config.recipes import RECIPES
from dilocox_jax.reference import methods, optimizers
from tests.codecs.alone import gaussian, through
from tests.oracles import codecs, events, least_squares
from tests.oracles.least_squares import arguments, fragment_names, make_problem
from tests.oracles.membership import train_apart

PROBLEM = make_problem(3, 3, 12, 5, 3, 8)


def test_the_gradient_is_the_slope_of_the_loss():
  params, A, y = PROBLEM
  _, grad = least_squares.loss_and_grad(params, A[0, 0], y[0, 0])
  x = least_squares.to_vector(params)
  for i in range(len(x)):
    step = np.zeros_like(x)
    step[i] = 1e-3
    up = least_squares.from_vector(x + step, params)
    down = least_squares.from_vector(x - step, params)
    above, _ = least_squares.loss_and_grad(up, A[0, 0], y[0, 0])
    below, _ = least_squares.loss_and_grad(down, A[0, 0], y[0, 0])
    slope = (above - below) / 2e-3
    assert abs(slope - least_squares.to_vector(grad)[i]) < 1e-9


def test_bfloat16_has_eight_significant_bits():
  assert codecs.bfloat16(1 + 2**-7) == 1 + 2**-7
  assert codecs.bfloat16(1 + 2**-8) == 1.0  # Half way: to the even one.
  assert codecs.bfloat16(-3 * (1 + 2**-9)) == -3.0
  assert codecs.bfloat16(0.0) == 0.0


@pytest.mark.parametrize(
  ("rounding", "values", "codes", "received"),
  [
    # 7 steps of 0.25 reach 1.75.
    (
      functools.partial(codecs.nearest, bits=4),
      [1.75, -1.75, 0.3, 0.6, 0.0],
      [15, 1, 9, 10, 8],
      [1.75, -1.75, 0.25, 0.5, 0.0],
    ),
    (
      functools.partial(codecs.nearest, bits=8),
      [127.0, -2.4, 0.0],
      [255, 126, 128],
      [127.0, -2.0, 0.0],
    ),
    # The mean size is 2: 1 and 1 lie below, 3 and 3 above.
    (codecs.two_magnitudes, [1, -1, 3, -3], [0, 2, 1, 3], [1, -1, 3, -3]),
    (codecs.two_magnitudes, [1, -2, 6, -3], [0, 2, 1, 2], [2, -2, 6, -2]),
    (codecs.signs, [1.0, -2.0, 3.0, 0.0], [0, 1, 0, 0], [1.5, -1.5, 1.5, 1.5]),
    # Levels 0, 1/64, ..., 1/2, 1.
    (
      codecs.powers_of_two,
      [1.0, -0.7, 0.02, 0.004, 0.4],
      [7, 14, 1, 0, 6],
      [1.0, -0.5, 1 / 64, 0.0, 0.5],
    ),
  ],
)
def test_codes_and_values_received(rounding, values, codes, received):
  found = rounding(values)
  assert found == (codes, received)
  leaf = np.array(values, np.float64)
  blocks = codecs.in_blocks(rounding)
  np.testing.assert_array_equal(blocks("x", leaf), received)


def test_the_largest_values_are_kept_and_of_equal_ones_the_first():
  values = [1.0, -3.0, 2.0, 3.0, -2.0]
  assert codecs.largest(values, 1) == ([1], [0.0, -3.0, 0.0, 0.0, 0.0])
  assert codecs.largest(values, 3) == ([1, 2, 3], [0.0, -3.0, 2.0, 3.0, 0.0])


def _sparse_in_2_bits(values):
  """Keeps 64 of 4096 values, and of these the sign and one of two sizes."""
  found = codecs.in_groups(
    values.reshape(1, -1),
    4096,
    lambda x: codecs.largest(x, max(1, round(len(x) / 64)))[1],
  )
  is_kept = found != 0
  found[is_kept] = codecs.two_magnitudes(found[is_kept])[1]
  return found.reshape(values.shape)


def _in_blocks(rounding):
  return functools.partial(codecs.in_blocks(rounding), "")


# What the papers send of a matrix, and the share of what is lost that is kept.
PAPERS = {
  "open_diloco": (lambda x: x.astype(np.float16), 0.0),  # arXiv 2407.07852
  "streaming_diloco": (_in_blocks(codecs.powers_of_two), 0.0),  # 2501.18512
  "sparse_loco": (_sparse_in_2_bits, 0.95),  # arXiv 2508.15706
  "muloco": (_in_blocks(codecs.two_magnitudes), 0.95),  # arXiv 2505.23725
  "overlap_loco": (_in_blocks(codecs.signs), 1.0),  # ours
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_sends_what_its_paper_sends(name):
  recipe = RECIPES[name]
  (sent, feedback) = PAPERS[name]
  assert recipe.get("exchange.feedback", 0.0) == feedback
  values = gaussian((1, 90, 100))
  found, _ = through(named_codec(recipe["exchange.codec"]), values)
  np.testing.assert_allclose(found[0], sent(values[0]), rtol=1e-6)


M = 3
H = 4
STEPS = 22


def both(method, away=(), inner_steps=(H,) * M, num_replicas=M):
  first, inputs, targets = make_problem(1, M, STEPS, 4, 2, 3)
  problem = first, inputs[:num_replicas], targets[:num_replicas], STEPS
  loss, params, batches = arguments(*problem)
  given = {
    "inner": optimizers.Sgd(lambda n: 0.05 / (1 + n), 0.3),
    "outer": optimizers.Sgd(0.7, 0.6, nesterov=True),
    "fragments": fragment_names(first, 1, "strided"),
    "sync_interval": H,
    **method,
  }
  apart = train_apart(
    loss,
    params,
    batches,
    away=away,
    inner_steps=inner_steps[:num_replicas],
    **given,  # pyright: ignore
  )
  return apart, methods.train(loss, params, batches, **given)  # pyright: ignore


def distance(one, other):
  return max(np.abs(one[name] - other[name]).max() for name in other)


@pytest.mark.parametrize(
  "method",
  [
    {"overlap_steps": 6, "rule": "continue"},
    {"overlap_steps": 2, "rule": "mix", "mixing_alpha": 0.3},
  ],
)
def test_a_replica_that_is_never_there_is_as_good_as_none(method):
  apart, plain = both(method)
  assert distance(apart.theta, plain.theta) == 0
  np.testing.assert_array_equal(apart.losses, plain.losses)
  apart, _ = both(method, [(2, r) for r in range(6)])
  _, pair = both(method, num_replicas=2)
  assert distance(apart.theta, pair.theta) < 1e-12


# Asked of SimGrid 3.32 with its model of TCP switched off as far as it departs
# from max-min shares; the file says with which configuration.
GOLDEN = pathlib.Path(__file__).parent / "golden" / "simgrid.json"
CASES = json.loads(GOLDEN.read_text())["cases"]


@pytest.mark.parametrize("name", CASES)
def test_every_flow_ends_when_simgrid_says(name):
  case = CASES[name]
  graph = events.Graph()
  numbers: list[int] = []
  for each in case["flows"]:
    after = [numbers[earlier] for earlier in each["after"]]
    after.append(graph.flow((), 0.0, (), each["start_s"]))
    limit = each["limit_bytes_per_s"] or math.inf
    args = tuple(each["links"]), each["size_bytes"], after, 0.0, limit
    numbers.append(graph.flow(*args))
  _, end_s = events.run_graph(graph, case["links"])
  np.testing.assert_allclose(end_s[numbers], case["end_s"], rtol=1e-9)
