"""An exchange and a drift correction of one's own."""

import jax

import dilocox_jax as dx


class Gossip(dx.Collective):
  """Averages with the neighbor on the left and on the right in turn."""

  is_shared = False

  def operations(self, encoder, shapes, num_replicas):
    """Returns one message to the neighbor."""
    del num_replicas
    return [dx.operation("permute", dx.encoded_bytes(encoder, shapes))]

  def reduce(self, encoder, leaves, sender):
    """Swaps messages inside the pairs 0-1, 2-3 and so on."""
    count = jax.lax.axis_size(sender.axis_name)
    pairs = [(one, one ^ 1) for one in range(count)]
    shapes = [leaf.shape for leaf in leaves]
    sent = yield encoder.encode(leaves)
    arrived = yield [
      jax.lax.ppermute(array, sender.axis_name, pairs) for array in sent
    ]
    own = encoder.decode(sent, shapes)
    other = encoder.decode(arrived, shapes)
    mean = [(a + b) / 2 for a, b in zip(own, other, strict=True)]
    return dx.Reduced(mean=mean, own=own)


def scaffold(method, axis_name):
  """SCAFFOLD (Karimireddy et al., 2020, arXiv 1910.06378), option II.

  A replica that has moved further than the mean moves back by the difference,
  spread over its next steps. With plain SGD inside this is the difference of
  the control variates times the learning rate. It sends nothing of its own.
  """
  del axis_name
  num_steps = method.schedule.sync_interval

  def correct(correction, result):
    return jax.tree.map(
      lambda old, sent, mean: old + (sent - mean) / num_steps,
      correction,
      result.sent,
      result.mean,
    )

  return dx.ApplyRule(correct=correct)


def register():
  """Makes them known by their names."""
  dx.register_collective("gossip", Gossip)
  dx.register_rule("scaffold", dx.RuleKind(scaffold, reads_alpha=False))
