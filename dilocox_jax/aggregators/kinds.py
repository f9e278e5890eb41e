"""The kinds of exchange by name, for `exchange.kind`."""

import dataclasses

from dilocox_jax.plan.choices import Lazy, Registry, check_lazy


@dataclasses.dataclass(frozen=True)
class ExchangeKind:
  """A way in which replicas combine what they measured.

  Attributes:
    collectives: Function, or its place, with the arguments and results of
      `aggregators.collectives.collectives`, which says what an exchange sends.
    aggregator: Function, or its place, with the arguments of
      `aggregators.exchange.exchange`, which returns an `Aggregator`.
  """

  collectives: Lazy
  aggregator: Lazy


EXCHANGES: Registry[ExchangeKind] = Registry("exchange")


def register_exchange(name: str, kind: ExchangeKind) -> None:
  """Makes a kind of exchange known under a name, for `exchange.kind`.

  Args:
    name: The name, e.g. "mean".
    kind: What is sent, and what sends it.

  Raises:
    ValueError: If the name is taken or a role of the exchange is missing.
  """
  check_lazy(f"exchange {name!r}: collectives", kind.collectives)
  check_lazy(f"exchange {name!r}: aggregator", kind.aggregator)
  EXCHANGES.add(name, kind)


register_exchange(
  "mean",
  ExchangeKind(
    "dilocox_jax.aggregators.collectives:collectives",
    "dilocox_jax.aggregators.exchange:exchange",
  ),
)
