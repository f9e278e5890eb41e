import math

import pytest

from dilocox_jax.report.convergence import Claim, Spread
from dilocox_jax.report.convergence_orderings import (
  HOLDS,
  MISSING,
  OVERLAP,
  REVERSED,
  TOO_FEW,
  bounded,
  compared,
  summary,
  verdicts,
)
from tests.report import convergences


@pytest.mark.parametrize(
  "better, other, result",
  [
    ((1.0, 1.1), (1.2, 1.3), HOLDS),
    ((1.2, 1.3), (1.0, 1.1), REVERSED),
    ((1.0, 1.2), (1.1, 1.3), OVERLAP),
    ((1.0, 1.3), (1.1, 1.2), OVERLAP),
    ((1.0, 1.1), (1.1, 1.2), OVERLAP),  # Equal is not lower.
    ((1.0,), (1.1, 1.2), HOLDS),
    ((1.0, math.nan), (1.1, 1.2), OVERLAP),
    ((1.0, 1.1), (1.2, math.nan), HOLDS),
    ((), (1.0,), MISSING),
    ((1.0,), (), MISSING),
  ],
)
def test_an_ordering_holds_only_without_overlap(better, other, result):
  assert compared(Spread(better), Spread(other)) == result


def test_every_pair_of_a_claim_is_judged_where_it_is_made():
  found = list(verdicts(convergences.comparison()))
  assert [(v.better, v.other, v.at, v.result) for v in found] == [
    ("allreduce", "diloco", "tokens", HOLDS),
    ("allreduce", "dilocox", "tokens", HOLDS),
    ("diloco", "dilocox", "tokens", OVERLAP),
    # At equal time AllReduce has fewer steps and ends higher.
    ("dilocox", "allreduce", "near", HOLDS),
    ("dilocox", "eager", "near", TOO_FEW),
    ("dilocox", "allreduce", "large", MISSING),
  ]
  assert found[0].is_complete and not found[4].is_complete


def test_a_claim_is_as_good_as_its_weakest_pair():
  def of(*claims):
    return list(verdicts(convergences.comparison(claims=claims)))

  every = of(Claim("allreduce", ("diloco", "dilocox"), "tokens"))
  assert summary(every) == HOLDS
  one_seed = of(Claim("allreduce", ("diloco", "eager"), "tokens"))
  assert summary(one_seed) == "seeds missing"
  overlap = of(Claim("diloco", ("eager", "dilocox"), "tokens"))
  assert summary(overlap) == OVERLAP
  worse = of(Claim("diloco", ("allreduce", "dilocox"), "tokens"))
  assert summary(worse) == REVERSED
  few = of(Claim("dilocox", ("allreduce", "eager"), "near"))
  assert summary(few) == TOO_FEW
  assert summary(of(Claim("absent", ("eager",), "tokens"))) == MISSING


@pytest.mark.parametrize(
  "gap, result",
  [(0.01, HOLDS), (0.012, HOLDS), (0.013, "exceeded"), (math.nan, MISSING)],
)
def test_a_gap_keeps_its_bound_or_exceeds_it(gap, result):
  assert bounded(gap, 0.012) == result
