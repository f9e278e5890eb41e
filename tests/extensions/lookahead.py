"""An outer transform outside the package: look-ahead with a schedule.

The outer step is any optax transformation. This one clips what replicas agree
on, keeps a momentum, and steps less from exchange to exchange.
"""

import optax

import dilocox_jax as dx


def clipped_momentum(
  learning_rate: float, momentum: float | None = None
) -> optax.GradientTransformation:
  """Clips the averaged pseudo-gradient and lets the step decay.

  Args:
    learning_rate: Learning rate of the first exchange.
    momentum: Share of the old step that is kept; None is 0.
  """
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.trace(momentum or 0.0),
    optax.scale_by_learning_rate(
      optax.exponential_decay(learning_rate, transition_steps=1, decay_rate=0.9)
    ),
  )


def register() -> None:
  """Makes "clipped_momentum" a name for `outer.optimizer`."""
  dx.register_optimizer("clipped_momentum", clipped_momentum)
