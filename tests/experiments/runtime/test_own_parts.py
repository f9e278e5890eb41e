"""Files that register parts before a program reads a run that has them."""

import subprocess
import sys

import pytest

from dilocox_jax.codecs.named import CODECS
from experiments.runtime.command_line import UsageError
from experiments.runtime.own_parts import register_parts
from tests import runs

REGISTERS = "from tests.extensions import ternary\nternary.register()\n"


@pytest.fixture(name="file")
def file_fixture(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(REGISTERS)
  own = dict(CODECS)
  yield file
  CODECS.clear()
  CODECS.update(own)


def command(name, *flags):
  return subprocess.run(
    [sys.executable, "-m", f"experiments.{name}", *flags],
    capture_output=True,
    text=True,
    check=False,
  )


def test_parts_are_known_after_their_file_was_run(file):
  assert "ternary" not in CODECS
  register_parts([str(file)])
  assert "ternary" in CODECS
  with pytest.raises(UsageError, match="'ternary' is registered already"):
    register_parts([str(file)])


def test_a_file_may_have_any_suffix_as_a_config_file_may(file):
  other = file.rename(file.with_suffix(".cfg"))
  register_parts([str(other)])
  assert "ternary" in CODECS


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("missing.py", "is not a file$"),
    ("", "is not a file$"),
    ("text.txt", "text.txt: NameError: name 'x' is not defined$"),
  ],
)
def test_what_is_no_python_file_is_refused(tmp_path, name, message):
  (tmp_path / "text.txt").write_text("x")
  with pytest.raises(UsageError, match=message):
    register_parts([str(tmp_path / name)])


def test_a_dataclass_of_the_file_finds_its_module(tmp_path):
  file = tmp_path / "part.py"
  file.write_text(
    "from __future__ import annotations\nimport dataclasses, typing\n"
    "@dataclasses.dataclass\nclass Part:\n  n: typing.ClassVar[int] = 1\n"
    "assert not dataclasses.fields(Part)\n"
  )
  register_parts([str(file)])


@pytest.mark.slow
def test_the_programs_that_read_a_run_know_its_parts(file, tmp_path):
  register_parts([str(file)])
  run = tmp_path / "run"
  runs.train(
    runs.settings(
      exchange={"codec": "ternary"}, total_steps=6, method="diloco"
    ),
    run,
  )
  for name, flags in (
    ("simulate", ("--step_s=0.5", f"--workdir={tmp_path / 'time'}")),
    ("export", (f"--workdir={tmp_path / 'model'}",)),
    ("sample", ("--num_tokens=3",)),
  ):
    flags = (f"--run={run}", *flags)
    done = command(name, *flags)
    assert done.returncode == 2, done.stdout
    assert "exchange.codec='ternary' must be one of" in done.stderr
    done = command(name, *flags, f"--parts={file}")
    if name == "sample":  # The synthetic text has no words.
      assert "the text has no tokenizer" in done.stderr
    else:
      assert done.returncode == 0, done.stderr
