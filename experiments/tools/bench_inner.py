"""The bench `inner`: tokens a second, utilization and memory of inner steps.

The utilization counts only the operations of the model (`flops_per_token`), so
a model that recomputes activations has a lower utilization.
"""

import statistics
from typing import Any

import jax
import numpy as np

from dilocox_jax.config import RunConfig
from dilocox_jax.config.platforms import on_platform
from dilocox_jax.inner.step import inner_step
from dilocox_jax.plan.model.shapes import flops_per_token, parameter_count
from dilocox_jax.training import build, states
from dilocox_jax.trees import Tree
from experiments.tools.timing import TimedProgram, seconds

STEPS = 10  # Inner steps of one measurement.

# Dense bfloat16 operations a second, by `device_kind`: from memory, not checked
# against data sheets.
DEVICE_PEAK_FLOPS = {
  "NVIDIA H200": 989e12,
  "NVIDIA H100 80GB HBM3": 989e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5p": 459e12,
  "TPU v6 lite": 918e12,
}


def steps_program(programs: build.Programs) -> Any:
  """Builds one jitted function that takes inner steps in all M replicas.

  Returns:
    A function (carry, batches) -> (next carry, metrics). A carry is the
    parameters and the inner optimizer state, leaves [M, ...]. Batches are
    tokens [M, steps, B, L + 1], and metrics have leaves [M, steps]. The
    function reuses the memory of its carry, which cannot be read afterwards.
  """
  step = inner_step(programs.steps.gradient, programs.steps.optimizer)
  replicas = programs.rounds.replicas

  def steps(carry: Tree, batches: Tree):
    def body(carry, batch):
      params, optimizer = carry
      params, optimizer, metrics = step(params, optimizer, batch)
      return (params, optimizer), metrics

    carry, metrics = jax.lax.scan(body, carry, batches)
    # Keeps the next carry sharded as the first one.
    return replicas.divided(carry), metrics

  return jax.jit(replicas.map(steps, (0, 0), (0, 0)), donate_argnums=0)


def first_carry(programs: build.Programs) -> Tree:
  """Returns first parameters and inner optimizer states, [replicas, ...].

  They are the first carry of `steps_program`. All replicas have the same.
  """
  replicas = programs.rounds.replicas
  params = states.first_params(programs, 0)

  def spread(params: Tree) -> Tree:
    carry = (params, programs.steps.optimizer.init(params))
    return jax.tree.map(replicas.copies, carry)

  shardings = replicas.state_shardings(jax.eval_shape(spread, params), 0)
  return jax.jit(spread, out_shardings=shardings)(params)


def drawn_batches(programs: build.Programs, config: RunConfig, num_steps: int):
  """Returns random tokens on the devices, [replicas, num_steps, B, L + 1]."""
  replicas = programs.rounds.replicas
  shape = (
    len(replicas.own),
    num_steps,
    config.data.batch_size,
    config.data.sequence_length + 1,
  )
  tokens = np.random.default_rng(0).integers(
    low=0, high=config.model.shape.vocab_size, size=shape, dtype=np.int32
  )
  return replicas.place_batches(tokens)


def timed_steps(
  config: RunConfig, num_steps: int
) -> tuple[TimedProgram, jax.stages.Compiled]:
  """Compiles a program of inner steps without any exchange.

  Returns:
    A function that takes the next `num_steps` inner steps and waits for their
    end, and the compiled program that this function runs.
  """
  programs = build.programs(config)
  batches = drawn_batches(programs, config, num_steps)
  carry = first_carry(programs)
  program = steps_program(programs).lower(carry, batches).compile()

  def run() -> None:
    nonlocal carry
    carry, metrics = program(carry, batches)
    jax.block_until_ready((carry, metrics))

  return run, program


def measure_steps(config: RunConfig, repeats: int) -> dict:
  """Measures rates and memory of inner steps without any exchange.

  The times are medians of `repeats` measurements of ten steps each.

  Returns:
    JSON values by name, such as "step_s", "tokens_per_s", "mfu" (share of the
    device's peak) and "peak_bytes". None stands for an unknown value.
  """
  run, program = timed_steps(config, STEPS)
  run()  # Warms up.
  times_s = [seconds(run) for _ in range(repeats)]
  return _rates(config, times_s) | _memory(program)


def _rates(config: RunConfig, times_s: list[float]) -> dict:
  """Computes rates from the times of `STEPS` inner steps (seconds).

  "mfu" (share of the device's peak) is None if the peak is not known.
  """
  shape = config.model.shape
  step_s = statistics.median(times_s) / STEPS
  step_tokens = config.mesh.num_replicas * config.tokens_per_replica_step
  tokens_per_s = step_tokens / step_s
  flops_per_s = tokens_per_s * flops_per_token(
    shape, config.data.sequence_length
  )
  device_flops_per_s = flops_per_s / config.num_devices
  peak = DEVICE_PEAK_FLOPS.get(jax.devices()[0].device_kind)
  platform_options = on_platform(config, build.platform_name())
  return {
    "num_devices": config.num_devices,
    "parameters": parameter_count(shape),
    "compute_dtype": platform_options.compute_dtype,
    "attention": platform_options.attention,
    "step_s": step_s,
    "tokens_per_s": tokens_per_s,
    "model_flops_per_s_per_device": device_flops_per_s,
    "mfu": device_flops_per_s / peak if peak else None,
    "label": (
      f"measured: median of {len(times_s)} measurements of {STEPS} inner steps"
    ),
  }


def _memory(program: jax.stages.Compiled) -> dict:
  """Returns the memory of one device by name (bytes); None for unknown numbers.

  The compiler counts the arguments and the temporaries of the program. The
  device counts the peak of all its memory.
  """
  analysis = program.memory_analysis()
  stats = jax.local_devices()[0].memory_stats() or {}
  return {
    "argument_bytes": getattr(analysis, "argument_size_in_bytes", None),
    "temporary_bytes": getattr(analysis, "temp_size_in_bytes", None),
    "peak_bytes": stats.get("peak_bytes_in_use"),
  }
