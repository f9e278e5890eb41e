"""The bench `peers`: our rounds, codecs and checkpoints beside PyTorch's.

Both sides work on the same tokens, tensors and bytes, in turn in one process
with all cores. Before rounds are timed, their losses must agree. Start-up times
are those of commands of their own.
"""

import contextlib
import itertools
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from dilocox_jax.codecs.compose import encoder
from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import ModelConfig, SyncConfig
from dilocox_jax.metrics.recorder import TIMING
from dilocox_jax.plan.wire.chain import Encoding
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Dense, Int
from dilocox_jax.pytypes import Tree
from dilocox_jax.report.text_tables import terminal_table
from dilocox_jax.training import build, run_text, states
from dilocox_jax.training.checkpoint import Checkpoints
from dilocox_jax.trees import leaves_by_path
from experiments.benchmarks import peer_decoder
from experiments.benchmarks.ratios import Ratio, TimedProgram, measure_ratio
from experiments.benchmarks.record import keep_record
from experiments.runtime.running import CACHE_VARIABLE

SYNC_INTERVAL = 50
# Goals, set beforehand: our seconds over PyTorch's are at most these.
_EAGER_BOUND, _COMPILED_BOUND, _EQUAL = 1 / 1.25, 1 / 1.15, 1.0
# Losses of the first step, and of a round and ten steps, may differ by so many
# nats. Later the two runs drift apart, because rounding errors grow.
_FIRST_LOSS_BOUND, _LOSS_BOUND = 1e-4, 1e-3
_COMPARED_STEPS = SYNC_INTERVAL + 10
_VALUES = Leaf(4, (1024, 4096))  # 64 MiB of fp32 a replica.
_BLOCK_SIZE = 128
_STARTS = 3
_PRESETS_SAVED = ("tiny", "small")


def peer_config(preset: str = "tiny") -> RunConfig:
  """Returns the config whose rounds and states are compared."""
  return RunConfig(
    model=ModelConfig(preset=preset),
    sync=SyncConfig(method="diloco", sync_interval=SYNC_INTERVAL),
  )


class Rounds:
  """Rounds of a config on the same batches, ours and PyTorch's."""

  def __init__(self, config: RunConfig):
    """Builds our side and runs its first two rounds, which compiles them."""
    self._config, self._programs = config, build.programs(config)
    streams = run_text.streams(config, run_text.corpus(config))
    self._batches = streams.take(config.sync.named.schedule.sync_interval)
    params = states.first_params(self._programs, "rounds", config.seed)
    # Copies, as rounds reuse the memory of the parameters.
    self._params = leaves_by_path(jax.tree.map(np.array, params))
    optimizer = jax.jit(self._programs.steps.optimizer.init)(params)
    self._state = self._programs.rounds.init(params, optimizer)
    self._placed = jax.device_put(self._batches)
    self._first_losses = self._two_rounds(self.run)

  @property
  def num_tokens(self) -> int:
    """Number of tokens that all replicas predict in a round."""
    return self._batches[..., 1:].size

  def run(self) -> np.ndarray:
    """Runs our next round, waits for it and returns its losses [M, H]."""
    rounds = self._programs.rounds
    self._state, (losses, _), _ = rounds.run(self._state, self._placed)
    return np.asarray(jax.block_until_ready((self._state, losses))[1])

  def peer(self, compiled: bool) -> Callable[[], np.ndarray]:
    """Returns the same for PyTorch, once it has trained like ours.

    Args:
      compiled: Whether `torch.compile` compiles the inner steps.

    Raises:
      RuntimeError: If the losses of its first two rounds are not ours.
    """
    torch = peer_decoder.load_torch()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    steps = range(self._config.total_steps + 1)
    rates = [np.asarray(self._programs.schedule(n)).item() for n in steps]
    parts = peer_decoder.peer_params(self._params), compiled
    rounds = peer_decoder.PeerRounds(self._config, rates, *parts)
    batches = torch.tensor(self._batches, dtype=torch.int64)
    losses = self._two_rounds(lambda: rounds.run_round(batches))
    differences = abs(losses - self._first_losses)[:, :_COMPARED_STEPS]
    if (
      differences[:, 0].max() > _FIRST_LOSS_BOUND
      or differences.max() > _LOSS_BOUND
    ):
      raise RuntimeError(
        f"PyTorch trains another model: losses differ by {differences.max()}"
      )
    print(f"losses of {differences.shape[1]} steps agree: {differences.max()}")
    return lambda: rounds.run_round(batches)

  @staticmethod
  def _two_rounds(run: Callable[[], np.ndarray]) -> np.ndarray:
    return np.concatenate([run(), run()], axis=1)


def _round_ratio(rounds: Rounds, mode: str) -> Ratio:
  compiled = mode == "compiled"
  bound = _COMPILED_BOUND if compiled else _EAGER_BOUND
  name = f"round of H = {SYNC_INTERVAL}, PyTorch {mode}"
  return Ratio(name, rounds.run, rounds.peer(compiled), bound)


def _codec_ratios(mode: str) -> list[Ratio]:
  """Compares codecs of two replicas: encode both, decode both and average.

  PyTorch has no codec of 1 bit, so its 8 bits stand beside ours.
  """
  drawn = np.random.default_rng(0).standard_normal
  values = [drawn(_VALUES.stacked_shape, np.float32) for _ in range(2)]
  peers = {
    name: peer_decoder.peer_codec(name, _BLOCK_SIZE, values, mode == "compiled")
    for name in ("float16", "int8")
  }
  ours = {"float16": Dense("float16"), "int8": Int(8), "int1": Int(1)}
  return [
    Ratio(
      f"{name}, PyTorch {peer} {mode}",
      _coded(payload, values),
      peers[peer],
      _EQUAL,
    )
    for name, payload in ours.items()
    for peer in ("float16" if name == "float16" else "int8",)
  ]


def _coded(payload: Dense | Int, values: list[np.ndarray]) -> TimedProgram:
  """Two programs, as on two machines; one would not need the codes at all."""
  coder = encoder(Encoding((payload,)), _VALUES)
  key, placed = jax.random.key(0), jax.device_put(values)
  encode = jax.jit(lambda pair: [coder.encode(x, key) for x in pair])

  @jax.jit
  def mean(wires: list) -> jax.Array:
    return sum(map(coder.decode, wires), jnp.float32(0)) / 2

  return lambda: jax.block_until_ready(mean(encode(placed)))


@contextlib.contextmanager
def _checkpoint_ratios(
  preset: str, folder: pathlib.Path
) -> Iterator[list[Ratio]]:
  """Compares saving and restoring one state, each until it is complete."""
  config = peer_config(preset)
  programs = build.programs(config)
  params = states.first_params(programs, "rounds", config.seed)
  state = states.fresh(programs, "rounds", params)
  size_mb = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6
  like = states.abstract(programs, "rounds")
  steps = itertools.count()
  save, load = peer_decoder.peer_checkpoint(
    leaves_by_path(jax.tree.map(np.asarray, state)), folder / "state.pt"
  )
  with contextlib.closing(Checkpoints(folder / "ours", keep=1)) as checkpoints:

    def our_save() -> None:
      checkpoints.save(next(steps), state, {})
      checkpoints.wait()

    def our_restore() -> Tree:
      return jax.block_until_ready(checkpoints.restore(lambda _: like))

    yield [
      Ratio(f"save {size_mb:.0f} MB, torch.save", our_save, save, _EQUAL),
      Ratio(f"restore {size_mb:.0f} MB, torch.load", our_restore, load, _EQUAL),
    ]


def _seconds_until(
  command: list[str],
  is_done: Callable[[], bool],
  cache: pathlib.Path,
) -> float:
  """Starts a binary, and ends it when something has happened or it exits."""
  environment = os.environ | {CACHE_VARIABLE: str(cache)}
  started = time.perf_counter()
  with subprocess.Popen(
    [sys.executable, "-m", *command],
    env=environment,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  ) as process:
    while process.poll() is None and not is_done():
      time.sleep(0.01)
    seconds = time.perf_counter() - started
    was_done = process.poll() == 0 or is_done()
    process.kill()
  if not was_done:
    raise RuntimeError(f"{' '.join(command)} failed: run it by hand")
  return seconds


def _first_dispatch_s(folder: pathlib.Path, cache: pathlib.Path) -> float:
  """Seconds until the first round of the default run is compiled and begins."""
  timing = folder / TIMING

  def is_done() -> bool:
    return timing.exists() and "compile" in timing.read_text()

  command = ["experiments.train", f"--workdir={folder}"]
  return _seconds_until(command, is_done, cache)


def start_up_s(folder: pathlib.Path) -> dict[str, list[float]]:
  """Measures how long commands take to start; returns seconds by name.

  Args:
    folder: Empty directory to work in.
  """
  help_text = ["experiments.train", "--help"]
  seconds: dict[str, list[float]] = {"--help": [], "cold": [], "warm": []}
  for number in range(_STARTS):
    cache, run = folder / f"cache{number}", folder / f"run{number}"
    seconds["--help"].append(_seconds_until(help_text, lambda: False, cache))
    for name in ("cold", "warm"):
      seconds[name].append(_first_dispatch_s(run / name, cache))
  names = {
    "--help": "experiments.train --help",
    "cold": "first round begins, empty compilation cache",
    "warm": "first round begins, warm compilation cache",
  }
  return {names[name]: values for name, values in seconds.items()}


def _modes() -> list[str]:
  """How PyTorch can run here: `torch.compile` needs a C++ compiler."""
  if shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++"):
    return ["eager", "compiled"]
  print("no C++ compiler: rows of torch.compile are left out")
  return ["eager"]


def run_peers(workdir: pathlib.Path, repeats: int) -> None:
  """Measures, writes bench_peers.json and prints a table.

  Args:
    workdir: Directory of the file.
    repeats: Paired measurements of every ratio.

  Raises:
    ValueError: If PyTorch is not installed. The message is one line.
    RuntimeError: If PyTorch does not train the same model.
  """
  torch = peer_decoder.load_torch()
  rounds, results = Rounds(peer_config()), {}
  for mode in _modes():
    for ratio in (_round_ratio(rounds, mode), *_codec_ratios(mode)):
      results[ratio.name] = measure_ratio(ratio, repeats)
  with tempfile.TemporaryDirectory(dir=workdir) as name:
    folder = pathlib.Path(name)
    for preset in _PRESETS_SAVED:
      (folder / preset).mkdir()
      with _checkpoint_ratios(preset, folder / preset) as ratios:
        for ratio in ratios:
          results[ratio.name] = measure_ratio(ratio, repeats)
    starts = start_up_s(folder)
  record = {
    "device": jax.devices()[0].device_kind,
    "cores": len(os.sched_getaffinity(0)),
    "jax": jax.__version__,
    "torch": torch.__version__,
    "repeats": repeats,
    "tokens_a_round": rounds.num_tokens,
    "label": "measured: medians of paired ratios in one process",
    "ratios": results,
    "start_up_s": starts,
  }
  keep_record(workdir, "peers", record, _table(results, starts))


def _table(results: dict[str, dict], starts: dict[str, list[float]]) -> Table:
  title = "Seconds of ours and of PyTorch, and ours over PyTorch's; measured"
  header = ("what", "ours", "PyTorch", "ratio", "min", "max", "at most")
  keys = ("measured_s", "baseline_s", "median", "min", "max", "bound")
  cells = [
    (name, *(f"{row[key]:.3g}" for key in keys))
    for name, row in results.items()
  ]
  cells += [
    (name, f"{statistics.median(seconds):.3g}")
    for name, seconds in starts.items()
  ]
  return terminal_table(header, cells, title=title)
