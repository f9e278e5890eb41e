"""What a type checker and an editor know about the public names."""

import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest

import dilocox_jax as dx
from dilocox_jax.plan.schedule.methods import METHODS
from tests.contracts import api_stub
from tests.tiers import slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEAD = """\
import optax
import dilocox_jax as dx

inner = optax.adamw(1e-3)
outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
codec = dx.named_codec("int(bits=4)")
"""
WRONG_CALLS = [
  "dx.diloco(inner, sync_intervall=8)",
  "dx.trian()",
  "dx.train(stps=3)",
  "dx.train(steps='3')",
  "dx.diloco(sync_interval=8)",
  "dx.allreduce(inner, sync_interval=8)",
  "dx.overlap_loco(inner, overlap_steps=2)",
  "dx.streaming_diloco(inner, mixing_alpha='0.5')",
  "dx.RunConfig(total_stps=3)",
  "dx.train().los",
  "dx.exchange('int(bits=4)', feedbak=1.0)",
  "dx.make_rounds(dx.Method(dx.SyncSchedule(8)), outer=outer, num_replicas=2)",
]
RIGHT_CALLS = [
  "dx.diloco(inner, sync_interval=8)",
  "dx.diloco(inner, outer, codec='int(bits=4)', axis_name='data')",
  "dx.train(method='diloco', replicas=2, steps=3).loss",
  "dx.allreduce(inner, codec=codec)",
  "dx.overlap_loco(inner, num_fragments=4, fragment_order='interleaved')",
  "dx.streaming_diloco(inner, outer, mixing_alpha=0.5)",
  "dx.delayed(inner, fragments=lambda path: 0, trainable=lambda path: True)",
  "dx.dilocox(inner, exchange=dx.exchange(codec, feedback=1.0))",
  "dx.RunConfig(total_steps=3)",
  "dx.load('runs/train').metrics.summary",
  "dx.estimate(dx.RunConfig(), '1gbit', step_s=0.1).total_s",
  "dx.__version__.split('.')",
]


def lines_with_errors(tool, path):
  """Numbers of the lines in which a type checker finds an error."""
  result = subprocess.run(
    [sys.executable, "-m", *tool, str(path)],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  report = json.loads(result.stdout)
  if "errors" in report:
    return {error["line"] for error in report["errors"]}
  return {
    error["range"]["start"]["line"] + 1
    for error in report["generalDiagnostics"]
    if error["severity"] == "error"
  }


@pytest.mark.parametrize(
  "tool",
  [
    [
      "pyrefly",
      "check",
      "--config=pyproject.toml",
      f"--search-path={ROOT}",
      f"--python-interpreter-path={sys.executable}",
      "--output-format=json",
    ],
    *slow(["pyright", "--pythonpath", sys.executable, "--outputjson"]),
  ],
  ids=["pyrefly", "pyright"],
)
def test_a_checker_finds_the_wrong_calls_and_only_these(tool, tmp_path):
  first_line = HEAD.count("\n") + 1
  first_wrong = first_line + len(RIGHT_CALLS)
  path = tmp_path / "calls.py"
  path.write_text(HEAD + "\n".join(RIGHT_CALLS + WRONG_CALLS) + "\n")
  wrong_lines = range(first_wrong, first_wrong + len(WRONG_CALLS))
  assert lines_with_errors(tool, path) == set(wrong_lines)


def test_the_stub_is_what_its_script_writes():
  assert api_stub.STUB.read_text() == api_stub.stub(), "run: make stubs"


def test_every_method_is_a_public_name():
  assert set(METHODS) <= set(dx.__all__)
  assert len(dx.__all__) == len(set(dx.__all__))


def test_every_public_name_is_on_the_page_of_the_api():
  page = (ROOT / "docs" / "api.md").read_text()
  described = re.findall(r"^\.\. auto\w+:: dilocox_jax\.(\w+)$", page, re.M)
  assert sorted(described) == sorted(dx.__all__)


@pytest.mark.parametrize("name", ["diloco", "overlap_loco", "allreduce"])
def test_help_shows_every_argument_of_a_method(name):
  make = getattr(dx, name)
  arguments = list(inspect.signature(make).parameters)
  assert "schedule" not in arguments
  described = re.findall(r"^  (\w+): ", make.__doc__, re.MULTILINE)
  assert described[: len(arguments)] == arguments
