"""What a compiled program needs and does, in numbers."""

import dataclasses
import functools
from fractions import Fraction
from typing import Any

import jax

from dilocox_jax.config import RunConfig
from dilocox_jax.outer.window import INNER_STEPS
from dilocox_jax.plan.model.shapes import flops_per_token
from dilocox_jax.plan.pipeline.timetable import ACTIONS, timetable
from experiments.compilation import hlo
from experiments.compilation.flops import Rounds, instruction_flops, total
from experiments.compilation.hlo import Instruction, Module
from experiments.compilation.program import Program
from experiments.compilation.transfers import (
  INSIDE,
  Transfer,
  inside_kind,
  is_inner_loop,
  sent_bytes,
  transfers,
)


@dataclasses.dataclass(frozen=True)
class Analysis:
  """Numbers of one device, for one window of a run.

  Attributes:
    memory: Bytes of "arguments", "outputs", "aliased", "temporaries" and
      "program", and "kept": of the training state, what lies beside it.
    peak_bytes: Most memory that the program uses at one time, as the compiler
      counts it. It is less than what is needed, since there is room between
      arrays.
    model_flops: Operations of the model's products.
    product_flops: Operations of all products.
    exchange_flops: Those outside the loops over inner steps.
    inside_bytes: Operand bytes inside a slice by kind of collective.
    sent_bytes: Bytes that go to other slices.
    planned_bytes: The same by the plan.
    transfers: Transfers between slices, in the order of the program.
    timeline: Name of each computation with transfers, its number of
      instructions, and the numbers of its loops over inner steps.
    num_steps: Inner steps of the window.
  """

  memory: dict[str, int]
  peak_bytes: int
  model_flops: float
  product_flops: float
  exchange_flops: float
  inside_bytes: dict[str, int]
  sent_bytes: float
  planned_bytes: float
  transfers: list[Transfer]
  timeline: dict[str, tuple[int, list[int]]]
  num_steps: int

  @property
  def needed_bytes(self) -> int:
    """Memory of one device that the run needs (bytes)."""
    return sum(self.memory.values()) - 2 * self.memory["aliased"]

  @property
  def num_hidden(self) -> int:
    """Number of transfers behind which inner steps run."""
    return sum(bool(each.hidden_by) for each in self.transfers)

  def to_json(self) -> dict[str, Any]:
    """Returns all numbers as plain values."""
    return dataclasses.asdict(self) | {"needed_bytes": self.needed_bytes}


def analyse(program: Program, compiled: jax.stages.Compiled) -> Analysis:
  """Reads memory, products, collectives and their order.

  Args:
    program: What was compiled.
    compiled: The compiled program.
  """
  config, steps = program.config, program.num_steps
  module = hlo.parse(compiled.as_text() or "")
  rounds, only_exchange = _rounds(module, config, steps)
  tokens = config.tokens_per_replica_step * steps
  share = config.division.num_devices
  model = flops_per_token(config.model.shape, config.data.sequence_length)
  found = transfers(module)
  count = config.mesh.num_replicas
  sent = functools.partial(sent_bytes, num_replicas=count)
  return Analysis(
    memory=_memory(compiled) | {"kept": program.kept_bytes},
    peak_bytes=_stats(compiled).peak_memory_in_bytes,
    model_flops=tokens * model / share,
    product_flops=float(total(module, instruction_flops, rounds)),
    exchange_flops=float(total(module, instruction_flops, only_exchange)),
    inside_bytes={
      kind: int(total(module, functools.partial(_inside, kind), rounds))
      for kind in INSIDE
    },
    sent_bytes=float(total(module, sent, rounds)),
    planned_bytes=program.planned_bytes / share,
    transfers=found,
    timeline=_timeline(module, found),
    num_steps=steps,
  )


def _stats(compiled: jax.stages.Compiled) -> Any:
  sizes = compiled.memory_analysis()
  assert sizes is not None
  return sizes


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
  sizes = _stats(compiled)
  return {
    "arguments": sizes.argument_size_in_bytes,
    "outputs": sizes.output_size_in_bytes,
    "aliased": sizes.alias_size_in_bytes,
    "temporaries": sizes.temp_size_in_bytes,
    "program": sizes.generated_code_size_in_bytes,
  }


def _inside(kind: str, module: Module, instruction: Instruction) -> int:
  if inside_kind(instruction) != kind:
    return 0
  return module.operand_bytes(instruction)


def _timeline(
  module: Module, found: list[Transfer]
) -> dict[str, tuple[int, list[int]]]:
  return {
    name: (
      len(module.computations[name]),
      [n for n, i in enumerate(module.computations[name]) if is_inner_loop(i)],
    )
    for name in dict.fromkeys(each.computation for each in found)
  }


def _rounds(
  module: Module, config: RunConfig, num_steps: int
) -> tuple[Rounds, Rounds]:
  """Returns how often loops run, with the inner steps and without them.

  All loops over inner steps have the same body and together `num_steps`
  rounds, so each may be taken to have the mean number.
  """
  in_step = _rounds_of_step(config)

  def among_steps(each: Fraction | int) -> Rounds:
    def rounds(name: str, branch: int | None) -> Fraction | int:
      is_loop = name.split("/")[-2:] == [INNER_STEPS, "while"]
      return each if is_loop else in_step(name, branch)

    return rounds

  none = among_steps(0)
  loops = total(module, lambda _, i: int(is_inner_loop(i)), none)
  return among_steps(num_steps / loops if loops else 0), none


def _rounds_of_step(config: RunConfig) -> Rounds:
  """Returns how often the loops of an inner step run, on a mean stage."""
  table = timetable(config.pipeline)
  chunks = table.num_stages * config.mesh.chunks_per_stage
  layers = Fraction(config.model.shape.num_layers, chunks)
  counts = {
    name: Fraction(int((table.action == number).sum()), table.num_stages)
    for number, name in enumerate(ACTIONS)
  }

  def rounds(name: str, branch: int | None) -> Fraction | int:
    scopes = name.split("/")
    if branch is None and scopes[-2] in ACTIONS:
      return counts[scopes[-2]] / table.num_ticks
    if branch is None and scopes[-4] in ACTIONS:
      return layers  # Only where stages have unequal numbers of them.
    if branch is None and scopes[-2] in ("embed", "head"):
      # One stage does it for every micro-batch, in one of its actions.
      action = next(scope for scope in scopes if scope in ACTIONS)
      share = Fraction(config.inner.accumulate_steps, table.num_stages)
      return share / counts[action]
    raise ValueError(f"it is not known how often the loop {name} runs")

  return rounds
