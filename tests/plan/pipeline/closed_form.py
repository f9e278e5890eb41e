"""The time of a pipelined step by formula, to hold the timeline to."""

from dilocox_jax.plan.pipeline.timeline import Pipeline, TickTimes


def closed_form_step_s(pipeline: Pipeline, times: TickTimes) -> float | int:
  """Seconds of a step without hops, from a formula instead of the lists.

  With F, B, I and W for forward, backward and its halves: GPipe and 1F1B take
  (m + p - 1)(F + B), interleaved m (F + B) + (p - 1)(F + B) / v, and ZB-H1
  m (F + B) + (p - 1)(F + I) - (min(m, p) - 1) min(F, I, W). All are exact.

  Source: GPipe, arXiv 1811.06965; arXiv 2104.04473, sections 2.2.1 and 2.2.2;
  ZB-H1, arXiv 2401.10241, Table 2: a bubble of (p - 1)(F + I - W).
  Differs: the table's bubble is this one for m >= p and W <= min(F, I) only.
  With fewer micro-batches fewer weight gradients are left to fill it, and one
  that is longer than a forward or an input gradient delays those behind it.

  Raises:
    ValueError: If an activation or a gradient takes time to travel.
  """
  if times.hop_s:
    raise ValueError(f"hop_s={times.hop_s} must be 0 for a closed form")
  filling = pipeline.num_stages - 1
  both_s = times.forward_s + times.backward_s
  work_s = pipeline.num_micro_batches * both_s
  if pipeline.name != "zb_h1":
    return work_s + filling * both_s / pipeline.chunks_per_stage
  input_s = times.work_s("input_gradient")
  weight_s = times.work_s("weight_gradient")
  filled = min(pipeline.num_micro_batches, pipeline.num_stages) - 1
  saved_s = filled * min(times.forward_s, input_s, weight_s)
  return work_s + filling * (times.forward_s + input_s) - saved_s
