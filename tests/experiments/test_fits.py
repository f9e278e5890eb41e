"""Whether a run fits: by arithmetic, and by the compiler for TPUs."""

import csv
import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys

import pytest

from dilocox_jax.checks import flat
from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.config.device_memory import device_memory, exchange_bytes
from dilocox_jax.config.step_memory import share_bytes
from dilocox_jax.plan.model import shapes
from dilocox_jax.plan.model.adapters import Lora
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from experiments.configs import compiled
from experiments.tools import compiled_run
from experiments.tools.absent_devices import (
  is_gpu_compiler_installed,
  is_tpu_compiler_installed,
)
from experiments.tools.compiled_run import (
  analyze,
  steady_program,
  write_compiled,
)
from tests import runs
from tests.experiments.programs import run
from tests.tiers import slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = "--config=experiments/configs/compiled.py:tiny_{}"
needs_compiler = pytest.mark.skipif(
  not is_tpu_compiler_installed(), reason="make compile-report installs libtpu"
)
needs_gpu_compiler = pytest.mark.skipif(
  not is_gpu_compiler_installed(),
  reason="make compile-report-gpu installs the compiler for GPUs",
)


def shown(*flags):
  """In a process of its own, which may have more devices than this one."""
  return subprocess.run(
    [sys.executable, "-m", "experiments.fits", *flags],
    capture_output=True,
    text=True,
    check=False,
  )


def sizes(text):
  rows = re.findall(r"^ (\S.*?)  +([\d.]+) (\w+) *$", text, re.MULTILINE)
  return {name: (float(number), unit) for name, number, unit in rows}


def test_a_model_of_the_papers_is_counted_and_spread_over_a_mesh():
  done = run(
    "fits",
    "--config=experiments/configs/papers.py:dilocox_107b",
    "--config.exchange.feedback=0",
    "--memory=80 GB",
  )
  shape = MODEL_PRESETS["qwen_107b"]
  assert f"{shapes.parameter_count(shape):,}" in done.stdout
  assert (
    f"{shapes.flops_per_token(shape, 2048):.4g} FLOPs a token" in done.stdout
  )
  found = sizes(done.stdout)
  # 16 devices hold six copies of 4 bytes a parameter, and factors.
  expected = 6 * 4 * shapes.parameter_count(shape) / 16 / 1e9
  number, unit = found["kept between steps (derived)"]
  assert unit == "GB" and 1 <= number / expected < 1.05
  # The memory that is needed is printed in whole GB.
  (lacking,) = re.findall(r"it lacks ([\d.]+) %", done.stderr)
  assert done.returncode == 1
  needed = found["needed"][0]
  assert float(lacking) == pytest.approx(100 * (needed / 80 - 1), abs=0.7)


def test_what_is_frozen_is_counted_once_and_adapters_alone_have_states():
  flags = "--config=experiments/configs/adapters.py:llama_1_1b", "--memory=12GB"
  # The adapters; Adam's two copies; the outer ones and their average; the
  # residual; a sixteenth in flight.
  megabytes = 4 * (6 + 1 / 16) * 12_615_680 / 1e6
  for count in (1, 2):
    text = run("fits", *flags, f"--config.mesh.num_replicas={count}").stdout
    found = sizes(text)
    # 1.1 billion values in fp32, and those of the layers in bfloat16 too.
    assert found["frozen, for all replicas (derived)"] == (6.34, "GB")
    kept, unit = found["kept between steps (derived)"]
    assert unit == "MB" and kept == pytest.approx(count * megabytes, abs=0.5)
    assert "fits with" in text and "a step of 8 x 1024 tokens" in text


@pytest.mark.parametrize(("share", "is_narrow"), [(0.91, True), (0.89, False)])
def test_less_than_a_tenth_to_spare_is_no_safe_fit(share, is_narrow):
  config = from_mapping({"mesh.num_replicas": 1})
  memory = round(device_memory(config).total / share)
  done = run("fits", "--config.mesh.num_replicas=1", f"--memory={memory} B")
  assert done.returncode == 0, done.stderr
  assert f"fits with {100 - 100 * share:.1f} % of" in done.stdout
  warned = "are an estimate, which may be wrong: 10 % should be left"
  assert (warned in done.stdout) == is_narrow


def test_the_compiler_knows_the_memory_of_its_devices(tmp_path):
  flags = TINY.format("dilocox"), "--compile=v5e:2x2", "--memory=80 GB"
  done = shown(*flags, f"--workdir={tmp_path}")
  assert done.returncode == 2
  assert "--memory needs no --compile" in done.stderr


@needs_compiler
@pytest.mark.parametrize(
  ("slices", "word"),
  [("v5e:3x17", "3x17"), ("v5e:2x4", "16"), ("v5e:2x2 --slices=1", "have 4")],
)
def test_slices_that_do_not_suit_are_one_line(tmp_path, slices, word):
  flags = TINY.format("dilocox"), *f"--compile={slices}".split()
  done = shown(*flags, f"--workdir={tmp_path}")
  assert done.returncode == 2 and word in done.stderr


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
  "name, stretches", [("delayed", 1), ("dilocox", 2), ("diloco", 0)]
)
def test_a_page_tells_what_a_tiny_run_needs(name, stretches, tmp_path):
  out = tmp_path / name
  done = shown(TINY.format(name), f"--workdir={out}", "--compile=v5e:2x2")
  assert done.returncode == 0, done.stderr
  found = json.loads((out / "compiled.json").read_text())
  assert found["fits"]
  # A tile of 1024 values is the least that a chip sends.
  assert 1 <= found["sent_bytes"] / found["planned_bytes"] < 1.03
  behind = [tuple(each["loops"]) for each in found["transfers"]]
  assert len(set(behind) - {()}) == stretches
  assert all(behind) == bool(stretches)
  page = (out / "report.md").read_text()
  assert "## Memory" in page and "## Transfers" in page


@pytest.mark.parametrize("gpus", ["h100:8y", "h100", "h100:4x4x8"])
def test_gpus_that_are_not_named_well_are_one_line(gpus, tmp_path):
  done = shown(
    TINY.format("dilocox"), f"--workdir={tmp_path}", f"--compile={gpus}"
  )
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert f"--compile={gpus}: write a kind and the number of GPUs" in line


@pytest.mark.skipif(is_gpu_compiler_installed(), reason="it is installed")
def test_a_missing_compiler_for_gpus_is_one_line(tmp_path):
  done = shown(
    TINY.format("dilocox"), f"--workdir={tmp_path}", "--compile=h100:4"
  )
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert "the compiler for GPUs is not installed: run `make" in line


@needs_gpu_compiler
@pytest.mark.slow
def test_a_page_tells_what_a_tiny_run_needs_on_gpus(tmp_path):
  done = shown(
    TINY.format("diloco"), f"--workdir={tmp_path}", "--compile=h200:4"
  )
  assert done.returncode == 0, done.stderr
  found = json.loads((tmp_path / "compiled.json").read_text())
  assert found["machine"] == "2 x h200:4"
  assert found["memory_bytes"] == 151_397_597_184
  assert found["fits"] and found["transfers"] is None
  assert "They are not listed" in (tmp_path / "report.md").read_text()


def test_attention_of_cudnn_is_not_compiled_without_a_gpu():
  config = from_mapping({"model.attention": "cudnn"})
  with pytest.raises(ValueError, match="take model.attention=blockwise"):
    compiled_run.without_cudnn(config)
  config = from_mapping({})
  assert compiled_run.without_cudnn(config).model.attention == "blockwise"
  config = from_mapping({"model.attention": "plain"})
  assert compiled_run.without_cudnn(config) == config


# Read from programs for TPUs (`make compile-report`, libtpu 0.0.42).
TABLE = ROOT / "docs/results/compiled_memory.csv"
ROWS = {
  row["run"]: row for row in csv.DictReader(TABLE.read_text().splitlines())
}
# Arrays of `tiny` are smaller than the tiles of a chip.
LARGE = [name for name in ROWS if not name.startswith("tiny")]
# And from programs for GPUs, which were compiled with attention "blockwise".
GPU_TABLE = ROOT / "docs/results/compiled_memory_gpu.csv"
GPU_ROWS = list(csv.DictReader(GPU_TABLE.read_text().splitlines()))
TOLERANCE = 0.07


@pytest.mark.parametrize("name", LARGE)
def test_the_estimate_says_what_a_compiled_program_needs(name):
  config = from_mapping(compiled.get_config(name).to_dict())
  memory = device_memory(config, platform="tpu")
  needed_bytes = float(ROWS[name]["needed_bytes"])
  state_bytes = float(ROWS[name]["state_bytes"])
  print(f"{name}: {memory.total / 2**30:.1f} of {needed_bytes / 2**30:.1f} GiB")
  assert memory.total == pytest.approx(needed_bytes, rel=TOLERANCE)
  assert memory.state == pytest.approx(state_bytes, rel=TOLERANCE)


@pytest.mark.parametrize("row", GPU_ROWS, ids=lambda row: row["changes"])
def test_the_estimate_says_what_a_gpu_needs_for_each_way_to_divide(row):
  values = flat(compiled.get_config(row["run"]).to_dict())
  for change in row["changes"].split():
    field, _, value = change.partition("=")
    values[field] = int(value) if value.isdigit() else value
  memory = device_memory(from_mapping(values))
  needed_bytes = float(row["needed_bytes"])
  assert memory.total == pytest.approx(needed_bytes, rel=TOLERANCE)


STREAMED = {"sync.method": "streaming_diloco", "sync.num_fragments": 4}


@pytest.mark.parametrize(
  ("changes", "num_copies"),
  [
    ({}, 3),
    (STREAMED | {"sync.overlap_steps": 0}, 3 / 4),
    # Steps run during the exchange, or gradients are averaged.
    (STREAMED | {"sync.overlap_steps": 10}, 0),
    ({"sync.method": "allreduce", "sync.sync_interval": None}, 0),
    # There is nobody to exchange with.
    ({"mesh.num_replicas": 1}, 0),
  ],
  ids=str,
)
def test_an_exchange_that_replicas_wait_for_needs_copies_of_the_parameters(
  changes, num_copies
):
  values = flat(compiled.get_config("diloco_llama_7b").to_dict())
  config = from_mapping(values | changes)
  copy_bytes = share_bytes(config.trained_shapes, config.division)
  found = exchange_bytes(config, "tpu")
  assert found == pytest.approx(num_copies * copy_bytes)
  # On GPUs, what arrives is written over what is sent.
  assert exchange_bytes(config, "gpu") == pytest.approx(2 / 3 * found)


def test_replicas_on_one_device_exchange_nothing_between_devices():
  config = from_mapping({"sync.method": "diloco"})
  assert config.mesh.layout == "stacked"
  assert exchange_bytes(config, "tpu") == 0


STREAMING = {
  "method": "streaming_diloco",
  "sync_interval": 6,
  "num_fragments": 2,
  "overlap_steps": 1,
}


@pytest.mark.parametrize("sync", [STREAMING, *slow({"method": "diloco"})])
def test_a_window_sends_the_plans_bytes_and_the_rest_of_the_state_is_kept(
  sync, tmp_path
):
  config = runs.settings(layout="mesh", total_steps=30, **sync)
  program = steady_program(config)
  traffic = to_plan.traffic(config)
  compiled = program.lowered.compile()
  found = analyze(config, program, compiled, "2 x v5e:2x2", 10**9)
  numbers = range(config.fragments.num_fragments)
  assert found.planned_bytes == max(map(traffic.exchange_bytes, numbers))
  assert found.num_steps == sync.get("overlap_steps", 3)
  sizes = [
    4
    * sum(map(math.prod, traffic.fragments.shapes(p, traffic.shapes).values()))
    for p in numbers
  ]
  # Parameters and momentum of the fragment that sends less.
  assert program.idle_bytes == 2 * sum(sorted(sizes)[:-1])
  assert found.needed_bytes >= found.state_bytes >= program.idle_bytes
  page = write_compiled(found, tmp_path, "command")
  assert "## Memory" in page.read_text() and found.fits


def test_of_rounds_that_grow_a_window_of_the_longest_is_compiled():
  growing = {"first_interval": 3, "steps_per_doubling": 12}
  config = runs.settings(
    method="diloco", sync_interval=6, total_steps=30, **growing
  )
  assert steady_program(config).num_steps == 6
  too_short = dataclasses.replace(config, total_steps=20)
  with pytest.raises(ValueError, match="take at least 24"):
    steady_program(too_short)


def test_a_run_of_which_nothing_arrives_is_refused():
  config = runs.settings(layout="mesh", total_steps=6)
  with pytest.raises(ValueError, match="take at least 9"):
    steady_program(config)


@pytest.mark.parametrize(
  ("method", "layout", "count", "shards", "copies", "messages"),
  [("diloco", "stacked", 1, 1, 5, 0), ("diloco", "stacked", 2, 1, 8, 0)]
  + [("diloco", "mesh", 2, 1, 5, 1), ("diloco", "mesh", 2, 2, 5, 1)]
  + [("allreduce", "mesh", 2, 1, 3, 3)],
)
def test_what_is_frozen_is_compiled_in_once_and_adapters_alone_have_states(
  method, layout, count, shards, copies, messages
):
  sync = {"method": method, "sync_interval": 3 if method == "diloco" else None}
  mesh = {"layout": layout, "num_data_shards": shards}
  config = runs.settings(num_replicas=count, mesh=mesh, **sync)
  config = dataclasses.replace(config, lora=Lora(rank=4))
  program = steady_program(config)
  division = config.division
  found = analyze(config, program, program.lowered.compile(), "", 10**9)
  values = sum(map(math.prod, config.trained_shapes.values()))
  kept = share_bytes(MODEL_PRESETS["nano"].parameter_shapes, division)
  kept += copies * share_bytes(config.trained_shapes, division)
  # Batches and losses are beside it.
  assert kept < found.state_bytes < kept + 4096
  assert program.planned_bytes == messages * (4 * values + 4)
