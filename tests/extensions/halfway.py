"""An apply rule outside the package: replicas go half of the way."""

import jax

from dilocox_jax.outer.rules import ApplyRule
from dilocox_jax.plan.schedule.methods import Method, RuleKind, register_rule


def halfway(method: Method, axis_name: str) -> ApplyRule:
  """Returns the rule; what is measured and averaged is that of `reset`."""
  del method, axis_name

  def rejoin(inner, old, new, own):
    del old, own
    return jax.tree.map(lambda w, b: 0.5 * w + 0.5 * b, inner, new)

  return ApplyRule(rejoin=rejoin)


def register() -> None:
  """Makes "halfway" a name for `sync.rule`, where tau is less than H."""
  kind = RuleKind(halfway, lambda interval, tau: tau < interval, "be below {}")
  register_rule("halfway", kind)
