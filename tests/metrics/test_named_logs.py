"""TensorBoard and W&B: their own files, read back."""

import importlib
import json
import struct
import time

import pytest

from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.metrics.run_logs import LogStart, as_log, opened, scalars
from dilocox_jax.metrics.work_directory import RefusedError

ROWS = [
  {"kind": "round", "step": 3, "loss": 2.5, "loss_per_replica": [2.0, 3.0]},
  {"kind": "timing", "step": 3, "event": "round", "wall_s": 0.25},
  {"kind": "evaluation", "step": 3, "outer_loss": 2.0, "mean_loss": None},
  {"kind": "round", "step": 6, "loss": 1.5, "loss_per_replica": [1.0, 2.0]},
  {"kind": "mailbox", "step": 6, "event": 1, "members": ["a"], "usage": {}},
  {"kind": "final", "step": 6, "outer_loss": 1.0, "flushed": True},
]


def write(name, workdir, rows, resume_step=None):
  """Writes rows to a named log, as a run does."""
  log = as_log(name)
  start = LogStart(workdir=workdir, config={"seed": 7}, resume_step=resume_step)
  with opened(log, start):
    for row in rows:
      log.write(row)


def points(rows):
  """The points of all curves: name, step and value."""
  return sorted(
    (name, row["step"], value)
    for row in rows
    for name, value in scalars(row).items()
  )


# TensorBoard.


@pytest.fixture(name="tensorboard_points")
def tensorboard_points_fixture():
  """Returns a function that reads the points by TensorBoard's own reader."""
  reason = "the extra tensorboard is not installed"
  pytest.importorskip("tensorboardX", reason=reason)
  reader = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason=reason
  )

  def read(folder):
    events = reader.EventAccumulator(str(folder)).Reload()
    return sorted(
      (name, event.step, event.value)
      for name in events.Tags()["scalars"]
      for event in events.Scalars(name)
    )

  return read


def test_tensorboard_reads_every_number_back(tmp_path, tensorboard_points):
  write("tensorboard", tmp_path, ROWS)
  assert tensorboard_points(tmp_path / "tensorboard") == points(ROWS)


def test_a_continued_run_replaces_its_points_in_tensorboard(
  tmp_path, tensorboard_points
):
  write("tensorboard", tmp_path, ROWS)
  again = [row | {"loss": 9.0} for row in ROWS[3:4]]
  write("tensorboard", tmp_path, again, resume_step=3)
  expected = points([*ROWS[:3], *again])
  assert tensorboard_points(tmp_path / "tensorboard") == expected


def test_tensorboard_follows_no_link(tmp_path, tensorboard_points):
  (tmp_path / "tensorboard").symlink_to(tmp_path)
  with pytest.raises(RefusedError, match="tensorboard"):
    write("tensorboard", tmp_path, ROWS)


# Weights & Biases.


def wandb_records(path):
  """The records of a file of W&B, as soon as the last one is written."""
  end_s = time.monotonic() + 60
  while time.monotonic() < end_s:
    records = list(records_so_far(path))
    if records and records[-1].WhichOneof("record_type") == "exit":
      return records
    time.sleep(0.1)
  raise AssertionError(f"{path} has no end")


def records_so_far(path):
  """Yields the records of a file of W&B, which is in the format of LevelDB.

  The file has a header of 7 bytes. A block has 32 KiB, and each piece of a
  record begins with a checksum, its length and its kind: whole (1), first (2),
  middle (3) or last (4).
  """
  wandb_internal_pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
  data = path.read_bytes()
  position = 7
  content = b""
  while position < len(data):
    left_in_block = 32_768 - position % 32_768
    if left_in_block < 7:
      position += left_in_block
      continue
    if position + 7 > len(data):
      return
    _, size, kind = struct.unpack("<IHB", data[position : position + 7])
    position += 7
    if position + size > len(data):
      return
    content += data[position : position + size]
    position += size
    if kind in (1, 4):
      record = wandb_internal_pb2.Record()
      record.ParseFromString(content)
      content = b""
      yield record


def wandb_rows(path):
  """The rows of a run's history, without the fields that W&B adds."""
  rows = []
  for record in wandb_records(path):
    if record.WhichOneof("record_type") == "history":
      items = {
        item.key or item.nested_key[0]: json.loads(item.value_json)
        for item in record.history.item
      }
      rows.append({k: v for k, v in items.items() if not k.startswith("_")})
  return rows


@pytest.fixture(name="offline")
def offline_fixture(monkeypatch):
  """Lets W&B write files, and send nothing."""
  pytest.importorskip("wandb", reason="the extra wandb is not installed")
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_SILENT", "true")


def test_an_offline_run_of_wandb_holds_every_row(tmp_path, offline):
  write("wandb(project=links)", tmp_path, ROWS)
  (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
  expected = [{"step": row["step"], **scalars(row)} for row in ROWS]
  assert wandb_rows(path) == expected
  (run,) = [
    record.run
    for record in wandb_records(path)
    if record.WhichOneof("record_type") == "run"
  ]
  assert run.project == "links" and run.display_name == tmp_path.name
  config = {item.key: item.value_json for item in run.config.update}
  assert config["seed"] == "7"


def test_a_continued_run_is_the_same_run_of_wandb(tmp_path, offline):
  ids = []
  for resume_step in (None, 3, None):
    write("wandb", tmp_path, ROWS[3:4], resume_step=resume_step)
    newest = max(
      tmp_path.glob("wandb/offline-run-*/*.wandb"),
      key=lambda path: path.stat().st_mtime_ns,
    )
    ids.append(newest.stem)
  assert ids[0] == ids[1] != ids[2]


def test_a_refusal_of_wandb_is_one_line(tmp_path, offline, monkeypatch):
  log = as_log("wandb")
  package = importlib.import_module("wandb")

  def refuse(**arguments):
    raise package.errors.UsageError("no account:\nlog in")

  monkeypatch.setattr(package, "init", refuse)
  start = LogStart(workdir=tmp_path, config={}, resume_step=None)
  with pytest.raises(RecordError, match="log wandb: no account") as caught:
    log.open(start)
  assert "\n" not in str(caught.value)
