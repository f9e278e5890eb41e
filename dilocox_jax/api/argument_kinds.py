"""Checks that an argument of a public function is of the kind that is meant.

Without them a wrong argument would end in an error from deep inside, such as
"'str' object has no attribute 'init'". All raise TypeError.
"""

import textwrap
from typing import Any

from dilocox_jax.aggregators.exchange import exchange as mean_exchange
from dilocox_jax.config import RunConfig
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.trees import Aggregator


def check_method(method: Any) -> None:
  """Raises TypeError for anything but a method, such as a method's name."""
  if not isinstance(method, Method):
    raise TypeError(
      f"method={_shown(method)} must be a Method, such as "
      "dilocox_jax.plan.schedule.methods.diloco(32); a method's own function, "
      "such as dilocox_jax.diloco, needs none"
    )


def check_optimizer(what: str, part: Any) -> None:
  """Raises TypeError unless an argument is an optax transformation.

  Args:
    what: Name of the argument, for the message.
    part: Its value.
  """
  if not hasattr(part, "init") or not hasattr(part, "update"):
    raise TypeError(f"{what}={_shown(part)} must be an optax transformation")


def aggregator_of(
  exchange: Aggregator | str, axis_name: str = REPLICA_AXIS
) -> Aggregator:
  """Returns an exchange, of which the name of a codec may stand for the mean.

  Args:
    exchange: An aggregator, or a codec such as "int(bits=4)".
    axis_name: Axis over which replicas are mapped, for a codec.

  Raises:
    TypeError: If it is no aggregator.
    ValueError: If there is no such codec.
  """
  if isinstance(exchange, str):
    return mean_exchange(exchange, axis_name=axis_name)
  check_exchange(exchange)
  return exchange


def check_exchange(exchange: Any) -> None:
  """Raises TypeError unless an exchange is an aggregator."""
  if not isinstance(exchange, Aggregator):
    raise TypeError(
      f"exchange={_shown(exchange)} must be a dilocox_jax.Aggregator, such as "
      "dilocox_jax.exchange('int(bits=4)', feedback=1.0)"
    )


def check_config(config: Any) -> None:
  """Raises TypeError unless the config of a run is one."""
  if not isinstance(config, RunConfig):
    raise TypeError(
      f"config of type {type(config).__name__} must be a "
      "dilocox_jax.RunConfig, such as dilocox_jax.RunConfig(total_steps=100)"
    )


def _shown(part: Any) -> str:
  """What was given, on one line; a tree of arrays would fill many."""
  return textwrap.shorten(repr(part), 80, placeholder=" ...")
