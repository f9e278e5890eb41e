import math

import pytest

from dilocox_jax.report.convergence.comparison import Claim
from dilocox_jax.report.convergence.orderings import (
  DIVERGED,
  HOLDS,
  MISSING,
  OVERLAP,
  REVERSED,
  SEEDS,
  TOO_FEW,
  bounded,
  compared,
  summary,
  verdicts,
)
from dilocox_jax.report.spread import Spread
from tests.report import convergences


@pytest.mark.parametrize(
  "better, other, result",
  [
    ((1.0, 1.1), (1.2, 1.3), HOLDS),
    ((1.2, 1.3), (1.0, 1.1), REVERSED),
    ((1.0, 1.2), (1.1, 1.3), OVERLAP),
    ((1.0, 1.3), (1.1, 1.2), OVERLAP),
    ((1.0, 1.1), (1.1, 1.2), OVERLAP),  # Equal is not lower.
    ((1.0,), (1.1, 1.2), SEEDS),
    ((1.2,), (1.0,), SEEDS),
    ((1.0, math.nan), (1.1, 1.2), DIVERGED),
    ((1.0, 1.1), (1.2, math.nan), DIVERGED),
    ((), (1.0,), MISSING),
    ((1.0,), (), MISSING),
  ],
)
def test_an_ordering_holds_only_without_overlap(better, other, result):
  assert compared(Spread(better), Spread(other), 2) == result


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


def test_a_claim_names_those_against_whom_it_does_not_hold():
  def of(better, than, at="tokens"):
    claims = [Claim(better, than, at, "us")]
    return summary(list(verdicts(convergences.comparison(claims=claims))))

  assert of("allreduce", ("diloco", "dilocox")) == HOLDS
  assert of("allreduce", ("diloco", "eager")) == "seeds missing: eager"
  assert of("diloco", ("dilocox", "wild")) == (
    "spreads overlap: dilocox; diverged: wild"
  )
  assert of("dilocox", ("allreduce", "diloco")) == (
    "reversed: allreduce; spreads overlap: diloco"
  )
  assert of("dilocox", ("allreduce", "eager"), "near") == "too few steps: eager"
  # What lacks runs is named, on whichever side of the claim it stands.
  assert of("absent", ("diloco", "dilocox")) == "not run: absent"
  assert of("diloco", ("absent", "dilocox")) == (
    "spreads overlap: dilocox; not run: absent"
  )
  assert of("eager", ("diloco", "dilocox")) == "seeds missing: eager"


@pytest.mark.parametrize(
  "name, most, result",
  [
    ("diloco", 0.0496, "holds (+4.95 ± 0.05 %; by seed +4.90 % to +5.00 %)"),
    ("diloco", 0.0494, "exceeded (+4.95 ± 0.05 %; by seed +4.90 % to +5.00 %)"),
    ("eager", 0.9, SEEDS),
    ("wild", 0.9, "exceeded (+inf %; by seed +1.00 % to -)"),
    ("absent", 0.9, MISSING),
  ],
)
def test_a_gap_keeps_its_bound_or_exceeds_it(name, most, result):
  assert bounded(convergences.comparison(), name, most) == result


def test_without_allreduce_no_gap_is_known():
  entries = convergences.comparison().entries[1:]
  alone = convergences.comparison(entries=entries)
  assert bounded(alone, "diloco", 0.9) == MISSING


def test_a_gap_to_what_diverged_is_no_gap():
  entries = [
    convergences.entry("allreduce", 3.0, math.nan),
    convergences.entry("diloco", 3.2, 3.25),
  ]
  assert bounded(convergences.comparison(entries=entries), "diloco", 1) == (
    DIVERGED
  )


def test_seeds_that_diverged_come_last():
  entries = [
    convergences.entry("allreduce", 3.0, 3.1, 3.1),
    convergences.entry("diloco", 3.2, math.nan, 3.25),
  ]
  found = convergences.comparison(entries=entries, seeds=3)
  assert bounded(found, "diloco", 1) == (
    "exceeded (+inf %; by seed +4.84 % to -)"
  )
