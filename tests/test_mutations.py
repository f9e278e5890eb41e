"""The list of mutations fits the code; `make mutations` tries them."""

import pathlib

import pytest

from tests import mutations
from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_line_is_there_once_and_its_tests_exist(mutation):
  assert mutations.is_applicable(mutation)
  for name in mutation.tests.partition(" -k ")[0].split():
    assert (ROOT / "tests" / name).exists()


def test_there_are_enough_and_no_two_are_the_same():
  assert len({(m.old, m.new) for m in MUTATIONS}) == len(MUTATIONS) >= 40


@pytest.mark.slow
def test_a_change_that_nobody_notices_is_a_survivor():
  path = pathlib.Path("plan/schedule/membership.py")
  harmless = Mutation(
    "a comment", str(path), '"""Says', '"""It says', "test_trees.py"
  )
  assert mutations.is_applicable(harmless)
  assert mutations.outcome(harmless) == "survived"
