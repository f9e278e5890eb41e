"""The inner optimizer: clip, schedule, and any optimizer of optax."""

import optax

from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.plan.choices import SCHEDULES


def learning_rate_schedule(
  name: str,
  peak: float,
  *,
  warmup_steps: int,
  total_steps: int,
  final_fraction: float,
  decay_fraction: float = 0.2,
) -> optax.Schedule:
  """A learning rate by inner step.

  Args:
    name: "constant", "cosine" or "wsd" (warm-up, stable, linear decay); all
      with a linear warm-up from 0.
    peak: Highest learning rate.
    warmup_steps: Steps until it is reached.
    total_steps: Steps of the whole run, at whose end the decay is complete.
    final_fraction: Last learning rate over the peak.
    decay_fraction: Part of the run that "wsd" decays in.

  Raises:
    ValueError: If the name is unknown or the warm-up does not fit.
  """
  if name not in SCHEDULES:
    raise ValueError(f"schedule={name!r} must be one of {', '.join(SCHEDULES)}")
  if not 0 <= warmup_steps < total_steps:
    raise ValueError(
      f"warmup_steps={warmup_steps} must be less than total_steps={total_steps}"
    )
  warmup = optax.linear_schedule(0.0, peak, warmup_steps)
  final = peak * final_fraction
  rest = total_steps - warmup_steps
  if name == "constant":
    parts, starts = [optax.constant_schedule(peak)], []
  elif name == "cosine":
    cosine = optax.cosine_decay_schedule(peak, rest, final_fraction)
    parts, starts = [cosine], []
  else:
    decay = max(1, min(rest, round(decay_fraction * total_steps)))
    parts = [
      optax.constant_schedule(peak),
      optax.linear_schedule(peak, final, decay),
    ]
    starts = [total_steps - decay]
  if not warmup_steps:
    return optax.join_schedules(parts, starts)
  return optax.join_schedules([warmup, *parts], [warmup_steps, *starts])


def inner_optimizer(
  name: str,
  schedule: optax.Schedule,
  *,
  clip_norm: float,
  **options: float | bool,
) -> optax.GradientTransformation:
  """Clips by the global norm, then steps.

  Args:
    name: An optimizer of optax.
    schedule: Learning rate by inner step.
    clip_norm: Largest gradient norm; 0 leaves gradients alone.
    **options: Options of the optimizer, e.g. b1, b2, weight_decay.
  """
  optimizer = named_optimizer(name, schedule, **options)
  if not clip_norm:
    return optimizer
  return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
