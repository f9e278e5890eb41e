import pytest

from dilocox_jax.reference import fragments
from tests.oracles import least_squares

PARAMS, _, _ = least_squares.make_problem(
  seed=3, num_replicas=1, num_steps=1, num_layers=5, width=3, batch=8
)


@pytest.mark.parametrize("order", ["sequential", "strided"])
def test_fragments_are_disjoint_and_cover_the_parameters(order):
  every = least_squares.split(PARAMS)
  parts = fragments.names_by_fragment(every, 4, order)
  assert len(parts) == 4 and all(parts)
  assert sorted(sum(parts, [])) == sorted(every)


def test_the_first_fragment_is_what_is_no_layer():
  every = least_squares.split(PARAMS)
  assert fragments.names_by_fragment(every, 1) == [list(every)]
  first, second, third = fragments.names_by_fragment(every, 3, "sequential")
  assert first == ["embed", "head"]
  assert second == [f"blocks/{name}/{n}" for name in "wb" for n in (0, 1, 2)]
  assert third == [f"blocks/{name}/{n}" for name in "wb" for n in (3, 4)]


def test_strided_fragments_interleave_and_sequential_ones_do_not():
  strided = [fragments.layers_of(p, 5, 3, "strided") for p in (1, 2)]
  sequential = [fragments.layers_of(p, 5, 3, "sequential") for p in (1, 2)]
  assert strided == [[0, 2, 4], [1, 3]]
  assert sequential == [[0, 1, 2], [3, 4]]
