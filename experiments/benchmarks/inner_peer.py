"""The inner steps of the bench `inner` in PyTorch, on the same NVIDIA GPU.

They are what PyTorch does best: `torch.compile`, flash attention, bfloat16
products of fp32 parameters, fused AdamW. They run in a process of their own
before JAX takes the memory of the device, which it does as a whole.
"""

import concurrent.futures
import importlib.util
import multiprocessing
import statistics
import time

import numpy as np

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.model.shapes import parameter_shapes
from experiments.benchmarks.peer_decoder import (
  load_torch,
  peer_loss,
  peer_params,
)

_INIT_SCALE = 0.02


def peer_rate(config: RunConfig, steps: int, repeats: int) -> float | None:
  """Returns tokens a second of one replica in PyTorch.

  Args:
    config: Config of the run.
    steps: Inner steps of one measurement.
    repeats: Number of measurements.

  Returns:
    The median, or None without PyTorch for NVIDIA GPUs, or if its decoder has
    no such model.
  """
  if importlib.util.find_spec("torch") is None:
    return None
  spawning = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, spawning) as process:
    return process.submit(_on_gpu, config, steps, repeats).result()


def _on_gpu(config: RunConfig, steps: int, repeats: int) -> float | None:
  if not load_torch().cuda.is_available():
    return None
  try:
    return measured_rate(config, steps, repeats, "cuda")
  except ValueError as error:
    print(f"without PyTorch: {error}")
    return None


def measured_rate(
  config: RunConfig,
  steps: int,
  repeats: int,
  device: str,
  compiled: bool = True,
) -> float:
  """Runs inner steps of one replica and returns tokens a second.

  Args:
    config: Config of the run.
    steps: Inner steps of one measurement.
    repeats: Number of measurements; one more warms up.
    device: Device of PyTorch, e.g. "cuda".
    compiled: Whether `torch.compile` compiles the loss and its gradient.

  Raises:
    ValueError: If the decoder in PyTorch has no such model.
  """
  torch, data, shape = load_torch(), config.data, config.model.shape
  rng = np.random.default_rng(0)
  with torch.device(device):
    loss = peer_loss(shape, data.sequence_length)
    params = peer_params(
      {
        path: _INIT_SCALE * rng.standard_normal(size, np.float32)
        for path, size in parameter_shapes(shape).items()
      }
    )
    size = (data.batch_size, data.sequence_length + 1)
    batch = torch.tensor(rng.integers(0, shape.vocab_size, size))
  leaves = [leaf.requires_grad_() for leaf in params.values()]
  optimizer = torch.optim.AdamW(leaves, lr=1e-4, fused=True)
  if compiled:
    loss = torch.compile(loss, fullgraph=True, dynamic=False)

  def run() -> float:
    for _ in range(steps):
      with torch.autocast(device, torch.bfloat16):
        value = loss(params, batch)
      value.backward()
      torch.nn.utils.clip_grad_norm_(leaves, config.inner.clip_norm or np.inf)
      optimizer.step()
      optimizer.zero_grad()
    return value.item()  # Waits for the device.

  seconds = []
  for number in range(repeats + 1):
    start_s = time.perf_counter()
    run()
    if number:
      seconds.append(time.perf_counter() - start_s)
  num_tokens = steps * data.batch_size * data.sequence_length
  return num_tokens / statistics.median(seconds)
