"""Wrong input at the command line: one line, exit code 2, nothing written."""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from experiments.runtime import command_line, config_flag, workdir_flag
from tests import runs
from tests.experiments.programs import run

EXAMPLE = "--cluster=experiments/clusters/example.json"
TEXT = "--config.data.source=text_files"
DEFAULT = "--config=experiments/configs/default.py"
# Program, its arguments, and the word that says what is wrong.
MISTAKES = [
  ("train", "--config.inner.total_steps=9", "did you mean 'total_steps'"),
  ("train", "--config.sync-interval=3", "unknown config field"),
  ("train", "--config.sync=diloco", "--config.sync=diloco"),
  ("train", "--config.total_steps=many", "total_steps=many"),
  ("train", "--config=nowhere.py", "nowhere.py"),
  ("train", "--config=experiments/configs/default.py:Makefile", "no JSON"),
  ("train", "--wrokdir=x", "workdir"),
  ("train", "--sample_tokens=9999999999999999999", "sample_tokens"),
  ("train", "train", "unexpected argument 'train'"),
  ("train", "--config.sync.method.x=1", "unknown config field"),
  ("train", "--noconfig.total_stepz", "did you mean 'total_steps'"),
  ("train", f"--config.seed=3 {DEFAULT}", "before a value for --config"),
  ("train", "--config=experiments/configs/compression.py", "a sweep, and not"),
  ("launch", "--config=experiments/configs/compression.py", "a sweep, and not"),
  ("simulate", "--config=experiments/configs/convergence.py:small", "a sweep"),
  ("train", f"{DEFAULT} --config.seed=x", "config.seed=x"),
  ("train", f"{TEXT} --config.data.glob=nowhere/*.txt", "nowhere/*.txt"),
  ("train", "--config.checkpoint.init_from=nowhere", "init_from=nowhere"),
  ("train", "--config.inner.optimizer=adamv --distributed", "'adamv'"),
  ("train", "--process_id=1", "--distributed"),
  ("train", "--distributed --coordinator=host", "give HOST:PORT"),
  ("train", "--distributed --num_processes=2 --process_id=2", "less than"),
  ("train", "--step_s=1", "--cluster"),
  ("train", EXAMPLE, "set mesh.num_replicas="),
  ("train", "--mailbox=x --replica=oslo --secret=absent", "make_secret"),
  ("train", "--mailbox=x --replica=Oslo --secret=absent", "='Oslo' must"),
  ("train", "--mailbox=", "give --mailbox and --replica and --secret"),
  ("train", "--mailbox=x --replica= --secret=y", "go together: give --replica"),
  ("train", "--parts=missing.py", "missing.py is not a file"),
  ("fits", "--parts=missing.py", "missing.py is not a file"),
  ("launch", "--config.mesh.num_replicas=3", "2 processes"),
  ("launch", "--num_processes=4", "leave it out"),
  ("launch", "--rtt='40 ms' --config.seed=1", "--rtt needs --link"),
  ("launch", "--link='1 Gbit/s' --rtt=40 --config.seed=1", "unit"),
  ("launch", "--link='1 Gbit/s' --loss='100 %' --config.seed=1", "below 1"),
  ("launch", "--link=fast --config.seed=1", "rate"),
  ("launch", "--link='1 bit/s' --config.seed=1", "between"),
  (
    "launch",
    "--processes=1 --link='1 Gbit/s' --config.seed=1",
    "--processes=2",
  ),
  ("simulate", "--step_s=nan", "step_s=nan"),
  ("simulate", "--cluster=1gbot", "1gbot"),
  ("simulate", EXAMPLE, "set mesh.num_replicas=4"),
  ("simulate", "--memory=80", "unit"),
  ("simulate", "--memory='0 GB'", "above 0"),
  ("simulate", "--memory='1e9999999999999999999 GB'", "out of range"),
  ("simulate", "--tokens=0", "tokens"),
  ("simulate", "--tokens=inf", "tokens"),
  ("speedup_tables", "--papers=nobody", "nobody"),
  ("fits", "--slices=3", "--compile"),
  ("fits", "--compile=", "--workdir needs --compile"),
  ("compare", "", "at least one run directory"),
  ("compare", "nowhere", "is not a run directory"),
  ("prepare_data", "--glob=*.txt --vocab_size=400", "--tokenizer=bpe"),
  (
    "prepare_data",
    "--glob=*.txt --tokenizer=bpe --vocab_size=99999999999999999999",
    "vocab_size",
  ),
  ("prepare_data", "--glob=*.txt --validation_fraction=nan", "_fraction=nan"),
  ("prepare_data", "", "glob"),
  ("export", "--run=nowhere", "is not a run directory"),
  ("sweep", "--config.gird.x=1", "did you mean 'grid'"),
  ("sweep", "--only=int5", "did you mean"),
  ("sweep", "--config.base.inner.optimizer=addam", "inner."),
  ("tools.bench", "", "name one bench"),
  ("tools.bench", "foo", "inner"),
  ("tools.bench", "round codecs", "name one bench"),
  ("tools.bench", "round --config.seed=3", "reads no config"),
  ("tools.links", "--processes=4", "--processes needs --cases=processes"),
]


@pytest.mark.parametrize(
  ("program", "arguments", "word"),
  MISTAKES,
  ids=lambda each: each or "nothing",
)
def test_a_mistake_is_one_line_and_writes_nothing(
  program, arguments, word, tmp_path
):
  workdir = tmp_path / "run"
  done = run(program, *shlex.split(arguments), f"--workdir={workdir}")
  assert done.returncode == 2 and word in done.one_line
  assert done.one_line.startswith("error: ")
  # An export makes its directory first.
  assert set(runs.files(tmp_path)) <= {"run/made_by.json"}


def test_a_missing_work_directory_is_asked_for():
  done = run("train")
  assert done.returncode == 2 and "--workdir is missing" in done.one_line


@pytest.mark.parametrize(
  "code, word",
  [
    ("x = (", "SyntaxError"),
    ("def get_config():\n  raise ValueError('late')", "ValueError: late"),
    ("def get_config():\n  return {}['stepz']", "KeyError: 'stepz'"),
    (
      "def get_config():\n  try:\n    {}['a']\n  except KeyError:\n"
      "    raise RuntimeError('late')",
      "RuntimeError: late",
    ),
    ("import sys\nsys.exit(0)", "SystemExit: 0"),
    (
      "def get_config():\n  return 3",
      "returns a int, and must return a Config",
    ),
  ],
)
@pytest.mark.parametrize("program", ["train", "sweep"])
def test_a_config_file_that_fails_is_named_with_the_reason(
  program, code, word, tmp_path
):
  (tmp_path / "mine.py").write_text(code + "\n")
  done = run(program, f"--config={tmp_path}/mine.py", f"--workdir={tmp_path}/x")
  assert done.returncode == 2
  assert word in done.one_line and f"{tmp_path}/mine.py" in done.one_line


def test_a_file_of_parts_that_ends_the_program_is_named(tmp_path):
  (tmp_path / "mine.py").write_text("import sys\nsys.exit(0)\n")
  done = run("train", f"--parts={tmp_path}/mine.py", f"--workdir={tmp_path}/x")
  assert done.returncode == 2
  assert f"--parts={tmp_path}/mine.py: SystemExit: 0" in done.one_line


def test_a_secret_that_cannot_be_written_is_one_line():
  done = run("make_secret", "--file=/proc/run.secret")
  assert done.returncode == 2
  assert "--file=/proc/run.secret cannot be written" in done.one_line


@pytest.mark.parametrize(
  "program, arguments, word",
  [
    ("launch", "--processes=3", "3 processes cannot share 2 devices"),
    ("train", "--distributed --num_processes=3 --process_id=0", "3 processes"),
    ("train", "--mailbox=x --replica=oslo --secret=absent", "make_secret"),
    ("simulate", "--transport=mailbox --tokens=9e4", "--workdir is missing"),
  ],
)
def test_a_config_may_be_locked_and_lack_the_sections_that_flags_set(
  program, arguments, word, tmp_path
):
  (tmp_path / "mine.py").write_text(
    "from ml_collections import config_dict\n"
    "def get_config():\n"
    "  values = {'model': {'preset': 'nano'}}\n"
    "  return config_dict.ConfigDict(values).lock()\n"
  )
  given = [f"--config={tmp_path}/mine.py", *shlex.split(arguments)]
  if "missing" not in word:
    given.append(f"--workdir={tmp_path}/run")
  done = run(program, *given)
  assert done.returncode == 2 and word in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("where", ["file/run", "/proc/run"])
def test_a_work_directory_that_cannot_be_written_is_refused(where, tmp_path):
  (tmp_path / "file").write_text("in the way")
  done = run("train", f"--workdir={tmp_path / where}")
  assert done.returncode == 2 and "cannot be written" in done.one_line
  assert runs.files(tmp_path) == {"file": b"in the way"}


def test_text_and_weights_that_do_not_fit_are_one_line(tmp_path):
  for number in range(40):
    (tmp_path / f"{number}.txt").write_text(f"text {number}")
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
  glob = f"--config.data.glob={tmp_path}/*.txt"
  for flags, word in (
    ([TEXT, glob, "--config.data.batch_size=900"], "use more text"),
    (["--config.data.tokenizer=no.json"], "no such file"),
    ([f"--config.checkpoint.init_from={tmp_path}"], "family 'gpt2'"),
  ):
    small = [f for f in runs.SMALL_FLAGS if "source" not in f]
    done = run("train", *small, *flags, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 2 and word in done.stderr, done.stderr


# Work directories.


@pytest.mark.parametrize(
  "program",
  [
    "train",
    "quickstart",
    "simulate",
    "speedup_tables",
    "sweep",
    "prepare_data --glob=*.md",
    "tools.links",
  ],
)
def test_no_program_writes_into_what_another_or_a_user_made(program, tmp_path):
  name, *given = program.split()
  workdir_flag.writable(str(tmp_path / "a"), "another")
  (tmp_path / "b").mkdir()
  (tmp_path / "b" / "report.md").write_text("of somebody")
  before = runs.files(tmp_path)
  for folder, word in (("a", "another"), ("b", "did not make")):
    done = run(name, *given, f"--workdir={tmp_path / folder}")
    assert done.returncode == 2 and word in done.one_line
    assert "choose another --workdir" in done.one_line
    assert runs.files(tmp_path) == before
  workdir_flag.writable(str(tmp_path / "a"), "another")


@pytest.mark.parametrize(
  ("link", "program"),
  [
    ("dilocox", "quickstart --method=dilocox"),
    ("profile", "train --profile"),
    ("profile/plugins", "train --profile"),
    ("checkpoints", "train"),
  ],
)
def test_no_program_writes_behind_a_link_in_its_directory(
  link, program, tmp_path
):
  (tmp_path / "victim").mkdir()
  name, *given = program.split()
  workdir = pathlib.Path(workdir_flag.writable(str(tmp_path / "run"), name))
  (workdir / link).parent.mkdir(parents=True, exist_ok=True)
  (workdir / link).symlink_to(tmp_path / "victim")
  small = runs.SMALL_FLAGS if name == "train" else []
  done = run(name, *given, *small, f"--workdir={workdir}")
  assert done.returncode == 2, done.stderr
  says = f"{pathlib.Path(link).name} is a symbolic link and has to be a folder"
  assert says in done.one_line
  assert not list((tmp_path / "victim").iterdir())


# How a program ends.


@pytest.mark.parametrize(
  "error, code, said",
  [
    (KeyboardInterrupt(), 130, "error: interrupted\n"),
    (command_line.StoppedError("no room", 75), 75, "error: no room\n"),
    (command_line.SavedAndStoppedError("saved", 15), 143, "saved\n"),
    (command_line.RecordError("line 3"), 1, "error: line 3\n"),
  ],
)
def test_what_stops_a_program_is_one_line(error, code, said, capsys):
  @command_line.one_line_errors()
  def main(argv):
    raise error

  with pytest.raises(SystemExit) as ended:
    main(["x"])
  assert ended.value.code == code and capsys.readouterr().err == said


def test_a_log_has_the_lines_of_the_run_and_no_marks_of_a_library():
  code = """
import logging
from absl import app
from experiments.runtime import command_line
def main(argv):
  logging.info("a line\\nand another")
  for library in ("absl", "jax", "orbax"):
    logging.getLogger(library).info("an aside of %s", library)
  logging.getLogger("jax").warning("a warning")
app.run(main, flags_parser=command_line.parse_flags)
"""
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert done.stderr == "a line\\nand another\na warning\n"


@pytest.mark.parametrize(
  "shell", ['exec "$@" | head -c 1', 'exec "$@" <&- >&- 2>&-']
)
def test_a_reader_that_leaves_and_closed_streams_cause_no_traceback(shell):
  code = """
from absl import app
from experiments.runtime import command_line
main = command_line.one_line_errors()(lambda _: print('x' * 10**6))
app.run(main, flags_parser=command_line.parse_flags)
"""
  words = ["sh", "-c", shell, "sh", sys.executable, "-c", code]
  done = subprocess.run(words, capture_output=True, check=False)
  assert done.returncode == 0 and done.stderr == b""


# Help.

PROGRAMS = sorted(
  ".".join(path.relative_to(config_flag.CONFIGS.parent).with_suffix("").parts)
  for folder in (".", "tools")
  for path in (config_flag.CONFIGS.parent / folder).glob("*.py")
  if "app.run(main" in path.read_text()
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_fits_a_terminal_and_its_examples_can_be_copied(program):
  done = run(program, "-h")
  assert done.returncode == 0 and f"experiments.{program} " in done.stdout
  lines = done.stdout.splitlines()
  assert max(map(len, lines)) <= 80
  for line, following in zip(lines, lines[1:], strict=False):
    is_continued = re.match(r" +--\w+[=.]", following) and "-m " in line
    assert not is_continued or line.endswith(" \\")


def test_help_is_there_at_once_and_loads_no_jax(tmp_path):
  """A module named jax that cannot be imported stands in the way."""
  (tmp_path / "jax.py").write_text("raise RuntimeError('jax was loaded')\n")
  root = str(config_flag.CONFIGS.parents[1])
  code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {root!r}]\n"
  code += "import runpy, time; sys.argv[1:] = ['--help']\n"
  code += "try:\n  runpy.run_module('experiments.train', run_name='__main__')\n"
  code += "finally:\n  print('seconds', time.process_time())"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert "--workdir" in done.stdout and "--distributed" in done.stdout
  assert float(done.stdout.split()[-1]) < 2
