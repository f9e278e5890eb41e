"""Sets up JAX, and trains the run of a program of `experiments`."""

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

import jax
from absl import logging as absl_logging
from rich.console import Console

from dilocox_jax import report
from dilocox_jax.api import memory_check
from dilocox_jax.api.progress import bar_console
from dilocox_jax.checks import in_front
from dilocox_jax.config import RunConfig
from dilocox_jax.data.corpus import Corpus
from dilocox_jax.distributed import coordinator_store, processes
from dilocox_jax.metrics import work_directory
from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.metrics.run_logs import RunLog
from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.token_ids import TokenError
from dilocox_jax.training import start
from dilocox_jax.training.mailbox_replica import MailboxAddress
from dilocox_jax.training.run_clock import Clock
from dilocox_jax.training.states import StopRequestedError, TrainingStoppedError
from dilocox_jax.training.trainer import Trainer
from dilocox_jax.training.watching import Watching
from experiments.runtime import (
  command_line,
  placement,
  samples,
  stop_signals,
)
from experiments.runtime.command_line import StoppedError, UsageError
from experiments.runtime.placement import ProcessSettings

CACHE_VARIABLE = "DILOCOX_JAX_CACHE"
_DEFAULT_CACHE = "~/.cache/dilocox_jax"
_PROFILE = ("profile", "plugins", "profile")  # Folders that the profiler makes.
# Numbers of <malloc.h>.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
XLA_GPU_FLAG = "--xla_gpu_enable_latency_hiding_scheduler=true"


def set_up_jax(num_cpu_devices: int = 1) -> None:
  """Sets options of JAX and XLA; call it before JAX starts its devices.

  Compiled programs are cached in $DILOCOX_JAX_CACHE, or else in
  ~/.cache/dilocox_jax. If the variable is set to "", there is no cache.

  Args:
    num_cpu_devices: Number of devices into which JAX divides the CPU; 0 or 1:
      the number is left to JAX.
  """
  cache = os.environ.get(CACHE_VARIABLE, _DEFAULT_CACHE)
  _keep_memory()
  _set_xla_flags()
  if num_cpu_devices > 1:
    jax.config.update("jax_num_cpu_devices", num_cpu_devices)
  if cache:
    path = pathlib.Path(cache).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Programs that compile for at least this long are cached.
    shortest = "jax_persistent_cache_min_compile_time_secs"
    jax.config.update(shortest, min(0.5, getattr(jax.config, shortest)))


def _keep_memory() -> None:
  """Lets the GNU C library keep up to 1 GiB of freed memory for later use."""
  # Otherwise freed buffers go back to the kernel, which clears every page of
  # the next buffer. That took half of the time of an exchange (measured).
  setting = getattr(ctypes.CDLL(None), "mallopt", None)
  if setting:
    setting(_TRIM_THRESHOLD, 2**30)
    setting(_MMAP_THRESHOLD, 2**30)


def _set_xla_flags() -> None:
  """Turns on XLA's latency-hiding scheduler if JAX has a CUDA plugin.

  Flags of the user in XLA_FLAGS come last and win.
  """
  # Without this flag an exchange that could hide behind inner steps runs before
  # them. TPUs need no flag. XLA ends a process with an unknown flag, so a test
  # starts the installed XLA with this one.
  if any(importlib.util.find_spec(name) for name in _GPU_PLUGINS):
    user_flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{XLA_GPU_FLAG} {user_flags}".strip()


def train(
  config: RunConfig,
  workdir: pathlib.Path,
  *,
  profile: bool = False,
  clock: Clock | None = None,
  process: ProcessSettings | None = None,
  address: MailboxAddress | None = None,
  num_sample_tokens: int = 100,
  check_memory: bool = True,
  log: RunLog | None = None,
) -> None:
  """Trains a run to its end, prints a table, and adds a sample to its report.

  With `process`, an error of the connection or in training ends this process
  instead of being raised: an orderly end would wait for the other processes.

  Args:
    config: Config of the run.
    workdir: The run directory.
    profile: Whether to write a profiler trace to workdir/profile.
    clock: Simulated clock of the run; None: the run has no simulated time.
    process: How this process finds the other processes of the run; None: the
      run has one process.
    address: Mailbox where the replica of this program meets those of other
      programs; None: the run has no mailbox.
    num_sample_tokens: Tokens of the sample in the report; 0: no sample. A run
      of several processes gets no sample.
    check_memory: Whether a run that needs more memory than a device has is
      refused.
    log: Gets every row of metrics that the run writes into files; None: the
      rows go to the files alone.

  Raises:
    UsageError: If the run cannot be set up as asked.
    RefusedError: If the directory holds another run.
    BusyError: If another program trains in the directory.
    StoppedError: If the run cannot go on.
    SavedAndStoppedError: If a signal asked the run to stop, after its state was
      saved.
  """
  with command_line.usage_errors():  # Before any device starts.
    check_optimizers(config)
  # Number of devices into which JAX divides the CPU of this process.
  num_devices = config.num_devices
  other_processes = contextlib.nullcontext()
  if process:
    num_devices = process.num_devices(config)
    other_processes = _joined(config, process)
  elif address:
    # This program has one replica of the run.
    num_devices = config.division.num_devices
  set_up_jax(num_devices)
  with other_processes:
    if check_memory:
      with command_line.usage_errors():
        memory_check.check_memory(config, go_on="--nocheck_memory")
    text = _train(
      config,
      workdir,
      profile=profile,
      clock=clock,
      address=address,
      log=log,
    )
    if num_sample_tokens and jax.process_count() == 1:
      _sample(workdir, num_sample_tokens, text)


def _train(
  config: RunConfig,
  workdir: pathlib.Path,
  *,
  profile: bool,
  clock: Clock | None,
  address: MailboxAddress | None,
  log: RunLog | None,
) -> Corpus:
  """Trains a run, prints a table of its results, and returns its text.

  The arguments and the errors are those of `train`.
  """
  # A program that started this one passes on the command that the user typed.
  command = os.environ.get(command_line.COMMAND_VARIABLE)
  command = command or command_line.typed_command()
  _check_directory(workdir)
  if profile:
    work_directory.check_subfolder(workdir, *_PROFILE)
  with command_line.usage_errors():
    overrides = start.with_trainable(config)
    trainer = Trainer(
      config,
      workdir,
      command=command,
      clock=clock,
      overrides=overrides,
      address=address,
      watching=Watching(log=log, console=bar_console()),
    )
  tracing = contextlib.nullcontext()
  if profile and processes.is_main():
    tracing = _trace(workdir / _PROFILE[0])
  try:
    with tracing, stop_signals.stop_requests(stopper(trainer)):
      page = trainer.run()
  except StopRequestedError as request:
    raise command_line.SavedAndStoppedError(request, request.signal) from None
  except (TrainingStoppedError, TokenError, RecordError, OSError) as error:
    raise StoppedError(str(error)) from error
  if processes.is_main():
    report.side_by_side([report.load_run(workdir)]).print(Console())
    print(f"report: {page}")
  text = trainer.data.text
  assert text, "commands train on texts only"
  return text


def stopper(trainer: Trainer) -> Callable[[int], None]:
  """Returns a function that stops a run when a signal has come.

  The function takes the number of the signal. A run that has begun saves and
  stops after its current segment (a round, or several data-parallel steps). A
  run that has not begun has nothing to save, so its process ends at once.
  """

  def stop(number: int) -> None:
    if trainer.has_begun:
      trainer.request_stop(number)
      return
    # Compiling cannot be interrupted and may take minutes, and a scheduler does
    # not wait so long.
    name = signal.Signals(number).name
    print(
      f"stopped by {name} before the first segment: there is nothing to save, "
      "and the same command begins again",
      file=sys.stderr,
    )
    processes.exit_now(128 + number)

  return stop


def _sample(
  workdir: pathlib.Path, num_tokens: int, text: Corpus | None = None
) -> None:
  """Adds a sample to the report, or prints why the run has no sample.

  `text` is the text of the run; None reads it again.
  """
  try:
    samples.add_sample(workdir, num_tokens, text=text)
  except (ValueError, RuntimeError) as error:
    print(f"no sample in the report: {error}")


def check_optimizers(config: RunConfig) -> None:
  """Raises ValueError if the inner or the outer optimizer cannot be built."""
  with in_front("inner."):
    named_optimizer(config.inner.optimizer, 1.0, config.inner.changed_options)
  with in_front("outer."):
    named_optimizer(config.outer.optimizer, 1.0)


def _check_directory(workdir: pathlib.Path) -> None:
  """Raises UsageError unless all processes of a run see one `workdir`."""
  if not processes.share_directory(workdir):
    raise UsageError(
      f"processes do not see one directory at --workdir={workdir}: take one on "
      "a file system that all share, or let replicas meet in a store by "
      "--mailbox"
    )


@contextlib.contextmanager
def _joined(config: RunConfig, process: ProcessSettings) -> Iterator[None]:
  """Connects this process with the others of its run while the block runs.

  An error of the connection or in the block ends this process with an exit code
  for the error, and is not raised.
  """
  where = (
    "" if process.process_id is None else f"process {process.process_id}: "
  )
  try:
    with command_line.usage_errors():
      processes.start(
        process.coordinator,
        process.num_processes,
        process.process_id,
        run=_digest(config),
        timeout_s=process.start_timeout_s,
        on_lost=_end_after_loss,
      )
    with processes.detect_lost_process():
      where = f"process {jax.process_index()}: "
      _log_warnings_only(where)
      owners = [device.process_index for device in jax.devices()]
      placement.check_devices(config, owners)
      yield
    return
  # `wait_for_end` waits until the other processes end too. Otherwise they would
  # report that they have lost this process.
  except command_line.ENDINGS as error:
    command_line.print_error(error, where)
    code = command_line.exit_code(error)
    coordinator_store.wait_for_end()
  except command_line.SavedAndStoppedError as request:
    if processes.is_main():
      print(request, file=sys.stderr)
    code = request.exit_code
    coordinator_store.wait_for_end()
  except processes.LostProcessError as error:
    command_line.print_error(error, where)
    code = command_line.TRY_AGAIN
  except KeyboardInterrupt:
    code = command_line.INTERRUPTED
  except BaseException:
    traceback.print_exc()
    code = 1
  processes.exit_now(code)


def _end_after_loss(error: processes.LostProcessError, number: int) -> None:
  """Prints that another process is lost, and ends this process with code 75.

  `number` is the number of this process.
  """
  command_line.print_error(error, f"process {number}: ")
  processes.exit_now(command_line.TRY_AGAIN)


def _digest(config: RunConfig) -> str:
  """Returns a digest of a config (32 hex digits)."""
  text = json.dumps(config.to_mapping(), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:32]


def _log_warnings_only(where: str) -> None:
  """Lets this process log only warnings, unless it is the main process.

  `where` is the text in front of each line, e.g. "process 1: ".
  """
  if processes.is_main():
    return
  absl_logging.set_verbosity(absl_logging.WARNING)
  absl_logging.get_absl_handler().setFormatter(
    command_line.OneLine(f"{where}%(message)s")
  )


def _trace(directory: pathlib.Path) -> contextlib.AbstractContextManager:
  """Returns a context that writes a profiler trace into a directory."""
  options = jax.profiler.ProfileOptions()
  # Every Python call of the compiler would make a trace a hundred times larger.
  options.python_tracer_level = 0
  return jax.profiler.trace(str(directory), profiler_options=options)
