import pytest

from dilocox_jax.aggregators import kinds
from dilocox_jax.aggregators.collectives import collectives
from dilocox_jax.aggregators.feedback import exchange
from dilocox_jax.aggregators.kinds import EXCHANGES, ExchangeKind
from dilocox_jax.plan.choices import loaded


def test_the_mean_is_what_an_exchange_is_by_itself():
  assert loaded(EXCHANGES["mean"].collectives) is collectives
  assert loaded(EXCHANGES["mean"].aggregator) is exchange


@pytest.mark.parametrize(
  ("name", "kind", "message"),
  [
    ("mean", EXCHANGES["mean"], "'mean' is registered already"),
    ("new", ExchangeKind(3, exchange), "'new': collectives=3 must be"),  # pyright: ignore
    ("new", ExchangeKind(collectives, "here"), "'new': aggregator='here'"),
  ],
)
def test_a_kind_that_cannot_be_is_refused_in_one_line(name, kind, message):
  with pytest.raises(ValueError, match=message):
    kinds.register_exchange(name, kind)
