"""An apply rule outside the package: replicas go half of the way."""

import jax

import dilocox_jax as dx


def halfway(method: dx.Method, axis_name: str) -> dx.ApplyRule:
  """Returns the rule; what is measured and averaged is that of `reset`."""
  del method, axis_name

  def rejoin(inner, old, new, own):
    del old, own
    return jax.tree.map(lambda w, b: 0.5 * w + 0.5 * b, inner, new)

  return dx.ApplyRule(rejoin=rejoin)


def register() -> None:
  """Makes "halfway" a name for `sync.rule`, where tau is less than H."""
  kind = dx.RuleKind(
    halfway, lambda interval, tau: tau < interval, "be below {}"
  )
  dx.register_rule("halfway", kind)
