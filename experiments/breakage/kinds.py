"""The faults: each starts a run, breaks it, and mends what it broke.

A fault returns the step from which the run must go on at least; 0 if it may
begin anew.
"""

import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from experiments.breakage.run import (
  DEADLINE_S,
  ROUND_STEPS,
  TOTAL_STEPS,
  NotPossibleError,
  Run,
  check,
  end,
)

# Put in front of a run as `sitecustomize`: Python imports it at its start.
_CLOCK_JUMPS = """
import time
real, calls = time.time, []
def jumping():
  calls.append(None)
  return real() + (0 if len(calls) < {count} else {jump_s})
time.time = jumping
"""
# The gradient of replica 1 is NaN in one step.
_NAN = """
import jax, jax.numpy as jnp, optax, sys
from dilocox_jax.inner import step
from dilocox_jax.training import build
def broken(gradient, optimizer):
  whole = step.inner_step(gradient, optimizer)
  def inner(params, state, batch):
    params, state, (loss, norm) = whole(params, state, batch)
    count = optax.tree.get_all_with_path(state, "count")[0][1]
    is_bad = (count == {step}) & (jax.lax.axis_index("replica") == 1)
    return params, state, (loss, jnp.where(is_bad, jnp.nan, norm))
  return inner
build.inner_step = broken
from experiments import train
from experiments.runtime import command_line
command_line.main(train.main, train.define_flags)
"""


def _signalled(number: int) -> Callable[[Run], int]:
  def fault(run: Run) -> int:
    process = run.start()
    run.until(process)
    process.send_signal(number)
    errors = end(process, 128 + number)
    check("the same command goes on" in errors, "no remedy was named")
    return run.rounds() * ROUND_STEPS  # Nothing may be lost.

  return fault


def killed(run: Run) -> int:
  """Kills the process."""
  process = run.start()
  run.until(process)
  os.killpg(process.pid, signal.SIGKILL)
  end(process, -signal.SIGKILL)
  return int(run.saved()[0].name) if run.saved() else 0


def signalled_twice(run: Run) -> int:
  """Asks it to stop, and again when it is still there."""
  process = run.start()
  run.until(process)
  os.kill(process.pid, signal.SIGSTOP)  # So the first one is not acted upon.
  process.send_signal(signal.SIGTERM)
  os.kill(process.pid, signal.SIGCONT)
  time.sleep(1.2)
  with contextlib.suppress(ProcessLookupError):
    process.send_signal(signal.SIGTERM)
  # It may be saved by then, and past the point where it handles signals.
  end(process, 128 + signal.SIGTERM, -signal.SIGTERM)
  return int(run.saved()[0].name) if run.saved() else 0


def _damaged(change: Callable[[pathlib.Path, random.Random], None]):
  def fault(run: Run) -> int:
    run.moment = max(run.moment, 7)  # Two checkpoints are complete then.
    killed(run)
    newest, older, *_ = run.saved()
    files = [path for path in newest.rglob("*") if path.is_file()]
    change(run.draw.choice(sorted(files)), run.draw)
    return int(older.name)

  return fault


def _truncate(path: pathlib.Path, draw: random.Random) -> None:
  os.truncate(path, draw.randrange(max(path.stat().st_size, 1)))


def _flip(path: pathlib.Path, draw: random.Random) -> None:
  raw = bytearray(path.read_bytes() or b"\0")
  raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
  path.write_bytes(raw)


def _delete(path: pathlib.Path, draw: random.Random) -> None:
  del draw
  path.unlink()


@contextlib.contextmanager
def _disk(workdir: pathlib.Path, size: str) -> Iterator[Callable[[str], None]]:
  """Puts a small disk at a directory while the block runs.

  Yields:
    Function that mounts it again with other options.
  """
  mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(workdir)]
  workdir.mkdir(parents=True, exist_ok=True)
  if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
    raise NotPossibleError("this user may not mount a small disk")

  def remount(options: str) -> None:
    again = ["mount", "-o", f"remount,{options}", str(workdir)]
    subprocess.run(again, check=True)

  kept = workdir.with_name(f"{workdir.name}_kept")
  try:
    yield remount
    shutil.copytree(workdir, kept)
  finally:
    subprocess.run(["umount", str(workdir)], check=True)
  workdir.rmdir()
  kept.rename(workdir)


def full_disk(run: Run) -> int:
  """Fills the disk below the run; there is room again for the next start."""
  with _disk(run.workdir, "64m") as remount:
    process = run.start()
    run.until(process)
    filler = run.workdir / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
      while True:
        file.write(bytes(1 << 16))
        file.flush()
    errors = end(process, 1)
    check("No space left" in errors or "are needed and" in errors, errors)
    filler.unlink()
    remount("size=128m")
    return int(run.saved()[0].name) if run.saved() else 0


def read_only(run: Run) -> int:
  """Takes away the right to write between two starts."""
  with _disk(run.workdir, "64m") as remount:
    step = killed(run)
    remount("ro")
    errors = end(run.start(), 2)
    check(str(run.workdir) in errors, "the directory was not named")
    remount("rw")
    return step


def changed_text(run: Run) -> int:
  """Damages a file of the text between two starts."""
  step = killed(run)
  path = run.draw.choice(sorted(run.text.glob("*.txt")))
  before = path.read_bytes()
  path.write_bytes(before[: len(before) // 2])
  errors = end(run.start(), 2)
  check("corpus: " in errors, "the text was not named")
  path.write_bytes(before)
  return step


def nan_gradient(run: Run) -> int:
  """Makes the gradient of one replica NaN in one step."""
  step = run.moment * ROUND_STEPS + run.draw.randrange(ROUND_STEPS)
  process = run.start(("-c", _NAN.replace("{step}", str(step))))
  errors = end(process, 1)
  check(f"at step {step} on replica 1" in errors, errors)
  return int(run.saved()[0].name) if run.saved() else 0


def clock_jumps(run: Run) -> int:
  """Lets the system's clock jump by a day, forwards or back."""
  folder = run.workdir.with_name(f"{run.workdir.name}_clock")
  folder.mkdir()
  jump_s = run.draw.choice((-86400, 86400))
  text = _CLOCK_JUMPS.replace("{jump_s}", str(jump_s))
  text = text.replace("{count}", str(run.draw.randrange(20, 500)))
  (folder / "sitecustomize.py").write_text(text)
  end(run.start(path=str(folder)), 0)
  shutil.rmtree(folder)
  return TOTAL_STEPS


def _peer(number: int) -> Callable[[Run], int]:
  """Kills or freezes one of two processes in the midst of their exchanges."""

  def fault(run: Run) -> int:
    run.processes = 2
    process = run.start()
    run.until(process)
    listed = subprocess.run(
      ["ps", "-A", "-o", "pid=,ppid="],
      capture_output=True,
      text=True,
      check=True,
    )
    pairs = [line.split() for line in listed.stdout.splitlines()]
    peers = [int(pid) for pid, parent in pairs if int(parent) == process.pid]
    os.kill(run.draw.choice(peers), number)
    errors = process.communicate(timeout=DEADLINE_S)[1]
    check(process.returncode, "the launcher did not notice")
    check("the same command continues" in errors, errors[-500:])
    return int(run.saved()[0].name) if run.saved() else 0

  return fault


# From a run that has not begun to the step from which it must go on at least.
FAULTS: dict[str, Callable[[Run], int]] = {
  "kill -9": killed,
  "SIGTERM": _signalled(signal.SIGTERM),
  "SIGINT": _signalled(signal.SIGINT),
  "a second signal": signalled_twice,
  "a truncated checkpoint": _damaged(_truncate),
  "a flipped bit of a checkpoint": _damaged(_flip),
  "a deleted file of a checkpoint": _damaged(_delete),
  "a full disk": full_disk,
  "a read-only directory": read_only,
  "a damaged text": changed_text,
  "NaN in a gradient": nan_gradient,
  "a clock that jumps": clock_jumps,
  "a killed peer": _peer(signal.SIGKILL),
  "a frozen peer": _peer(signal.SIGSTOP),
}
