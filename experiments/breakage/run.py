"""A small run in processes of its own, and what is asked of its end."""

import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

TOTAL_STEPS, ROUND_STEPS, SAVE_STEPS = 200, 10, 20
DEADLINE_S = 600
_SETTINGS = {
  "total_steps": TOTAL_STEPS,
  "data.source": "text_files",
  "data.batch_size": 2,
  "data.sequence_length": 16,
  "model.preset": "nano",
  "model.scan_unroll": 1,
  "inner.warmup_steps": 5,
  "evaluation.interval_steps": 0,
  "evaluation.num_sequences": 8,
  "checkpoint.interval_steps": SAVE_STEPS,
  "checkpoint.keep": 3,
  "sync.sync_interval": ROUND_STEPS,
}


class NotSurvivedError(Exception):
  """A fault that cost more than it may; the message says what."""


class NotPossibleError(Exception):
  """A fault that cannot be made here; the message says why."""


def check(condition: object, message: str) -> None:
  """Raises NotSurvivedError if a condition does not hold."""
  if not condition:
    raise NotSurvivedError(message)


@dataclasses.dataclass
class Run:
  """One run of the small model.

  Attributes:
    method: Name of its config.
    workdir: Where it writes.
    text: Folder of the text that it reads.
    moment: Rounds after which the fault comes.
    draw: Random numbers of this fault.
    processes: Number of its processes; 0 starts it without the launcher.
  """

  method: str
  workdir: pathlib.Path
  text: pathlib.Path
  moment: int = 0
  draw: random.Random = dataclasses.field(default_factory=random.Random)
  processes: int = 0

  def start(
    self, first: tuple[str, ...] = ("-m", "experiments.train"), path: str = ""
  ) -> subprocess.Popen:
    """Starts it, in a group of processes of its own.

    Args:
      first: Arguments of Python before those of the run.
      path: Folder in front of Python's path.
    """
    settings = _SETTINGS | {"data.glob": str(self.text / "*.txt")}
    config = pathlib.Path(__file__).parents[1] / "configs" / f"{self.method}.py"
    if self.processes:
      count = f"--processes={self.processes}"
      first = ("-m", "experiments.launch", count, "--")
    root = str(pathlib.Path(__file__).resolve().parents[2])
    return subprocess.Popen(
      [
        *(sys.executable, *first, f"--config={config}"),
        *(f"--workdir={self.workdir}", "--sample_tokens=0"),
        *(f"--config.{name}={value}" for name, value in settings.items()),
      ],
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,
      env=os.environ
      | {"PYTHONPATH": os.pathsep.join(filter(None, [path, root]))},
    )

  def until(self, process: subprocess.Popen) -> None:
    """Waits until as many rounds are written as the moment says."""
    give_up = time.monotonic() + DEADLINE_S
    with _killed_on_error(process):
      while self.rounds() < self.moment:
        if process.poll() is not None:
          raise NotSurvivedError(
            f"it ended too early: {process.communicate()[1]}"
          )
        check(time.monotonic() < give_up, "the moment never came")
        time.sleep(0.0005)

  def rounds(self) -> int:
    """Returns how many rounds are written."""
    return self.metrics().count(b'"kind": "round"')

  def metrics(self) -> bytes:
    """Returns the bytes of the rows."""
    path = self.workdir / "metrics.jsonl"
    return path.read_bytes() if path.exists() else b""

  def saved(self) -> list[pathlib.Path]:
    """Returns the folders of its checkpoints, the newest first."""
    found = (self.workdir / "checkpoints").glob("*")
    whole = [path for path in found if path.name.isdigit()]
    return sorted(whole, key=lambda path: -int(path.name))


@contextlib.contextmanager
def _killed_on_error(process: subprocess.Popen) -> Iterator[None]:
  """Kills a run and its group where nobody would wait for its end."""
  try:
    yield
  except BaseException:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    raise


def end(process: subprocess.Popen, *codes: int) -> str:
  """Waits for the end of a process; checks its code and its one line.

  Returns:
    The errors that it has printed.
  """
  try:
    with _killed_on_error(process):
      errors = process.communicate(timeout=DEADLINE_S)[1]
  except subprocess.TimeoutExpired:
    raise NotSurvivedError("it never ended") from None
  code = process.returncode
  said = f"it ended with {code} instead of {codes}: {errors[-500:]}"
  check(code in codes, said)
  if code in (1, 2):
    lines = [x for x in errors.splitlines() if x.startswith("error: ")]
    check(len(lines) == 1, f"it said {len(lines)} lines: {errors[-500:]}")
  check("Traceback" not in errors, f"a traceback: {errors[-500:]}")
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, 0)
    raise NotSurvivedError("a process was left behind")
  return errors


def write_text(folder: pathlib.Path) -> None:
  """Writes a text from which the small model can learn something."""
  folder.mkdir(parents=True)
  for number in range(40):
    words = [f"{(number + k) % 7} of {k % 11}" for k in range(400)]
    (folder / f"{number}.txt").write_text(" ".join(words))
