"""Bad input through the real command line: one line, a code, nothing lost."""

import subprocess
import sys

import pytest

from experiments.runtime import running
from experiments.runtime.command_line import UsageError
from tests import runs

SMALL = (*runs.SMALL_FLAGS, "--config.checkpoint.interval_steps=3")
CONFIG = "--config=experiments/configs/{}.py"

BAD = {
  "misspelt field": (
    ["--config.sync.sync_intervall=3"],
    "did you mean 'sync_interval'?",
  ),
  "misspelt section": (
    ["--config.snyc.sync_interval=3"],
    "did you mean 'sync'?",
  ),
  "dash in a field": (["--config.sync-interval=3"], "unknown config field"),
  "value of a section": (["--config.sync=diloco"], "config.sync is a section"),
  "infinite rate": (
    ["--config.inner.learning_rate=inf"],
    "inner.learning_rate=inf must be above 0 and below inf",
  ),
  "unknown method": (["--config.sync.method=dilocoy"], "dilocox"),
  "interval of zero": (
    ["--config.sync.sync_interval=0"],
    "sync_interval=0 must be at least 1",
  ),
  "negative interval": (
    ["--config.sync.sync_interval=-5"],
    "sync_interval=-5 must be at least 1",
  ),
  "overlap not below the interval": (
    [CONFIG.format("streaming_diloco"), "--config.sync.overlap_steps=30"],
    "overlap_steps=30 must be less than sync_interval=30",
  ),
  "more fragments than layers": (
    [CONFIG.format("streaming_diloco"), "--config.sync.num_fragments=5"],
    "num_fragments=5 must not exceed num_layers=4",
  ),
  "batch not divisible": (
    ["--config.inner.accumulate_steps=3"],
    "data.batch_size=8 must be divisible by inner.accumulate_steps=3",
  ),
  "ranks of gradients": (
    [
      CONFIG.format("allreduce"),
      "--config.exchange.codec=low_rank(rank=4)+int",
      "--config.adaptive.mode=rank",
    ],
    "'allreduce' sends gradients",
  ),
  "wrong type": (["--config.total_steps=many"], "many"),
  "setting of another method": (
    ["--config.sync.overlap_steps=3"],
    "is not a setting of method 'diloco'",
  ),
  "missing config file": (["--config=nowhere.py"], "--config=nowhere.py"),
  "misspelt flag": (["--wrokdir=x"], "workdir"),
  "stray argument": (["train"], "unexpected argument 'train'"),
  "glob without its source": (
    ["--config.data.glob=*.txt"],
    "data.glob='*.txt' would be ignored, as data.source=stdlib reads no files: "
    "set data.source=text_files",
  ),
  "seed beyond any integer": (
    ["--config.seed=9223372036854775808"],
    "seed=9223372036854775808 must be from 0 to 4294967295",
  ),
  "negative seed": (["--config.seed=-1"], "seed=-1 must be from 0"),
  "negative z-loss": (
    ["--config.model.z_loss=-1"],
    "model.z_loss=-1.0 must be at least 0",
  ),
  "rank above that of any matrix": (
    ["--config.exchange.codec=low_rank(rank=99999)"],
    "rank=99999 exceeds that of every matrix",
  ),
  "text for an integer": (
    ["--config.inner.warmup_steps=four"],
    "warmup_steps=four must be a whole number, written in digits",
  ),
  "text for a number": (
    ["--config.inner.learning_rate=fast"],
    "--config.inner.learning_rate=fast must be a number",
  ),
  "text for a link's number": (
    ["--config.exchange.codec=low_rank(rank=four)+int"],
    "exchange.codec low_rank: rank='four' must be of type int",
  ),
  "setting of a codec as a field": (
    ["--config.codec.gain=2"],
    "(a codec's settings stand behind its name in exchange.codec)",
  ),
  "momentum of AdamW": (
    ["--config.inner.momentum=0.9"],
    "inner.momentum=0.9 would be ignored, as inner.optimizer=adamw",
  ),
  "feedback on float32": (
    ["--config.exchange.feedback=1"],
    "exchange.feedback=1.0 would be ignored",
  ),
  "pipeline of one stage": (
    ["--config.mesh.pipeline=gpipe"],
    "mesh.pipeline='gpipe' would be ignored",
  ),
  "warm-up as long as the run": (
    ["--config.total_steps=40", "--config.inner.warmup_steps=40"],
    "inner.warmup_steps=40 must be less than total_steps=40",
  ),
  "empty glob": (
    [
      "--config.data.source=text_files",
      "--config.data.glob=nowhere/*.txt",
    ],
    "nowhere/*.txt",
  ),
  "unknown source": (["--config.data.source=web"], "stdlib"),
  "nothing to start from": (
    ["--config.checkpoint.init_from=nowhere"],
    "checkpoint.init_from=nowhere is not a run directory",
  ),
}


def train(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "experiments.train", *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


def assert_one_line(done, code):
  lines = done.stderr.splitlines()
  assert done.returncode == code, done.stderr
  assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_answered_with_one_line(case, tmp_path):
  arguments, hint = BAD[case]
  done = train(*arguments, f"--workdir={tmp_path / 'run'}")
  assert_one_line(done, 2)
  assert hint in done.stderr
  assert set(runs.files(tmp_path)) <= {"run/.train.lock", "run/made_by.json"}


@pytest.mark.parametrize("arguments", [[], ["--workdir="]])
def test_a_missing_work_directory_is_asked_for(arguments):
  done = train(*arguments)
  assert_one_line(done, 2)
  assert "--workdir is missing" in done.stderr


@pytest.mark.parametrize(
  "code, hint",
  [
    ("x = (", "SyntaxError"),
    (
      "def get_config():\n  raise ValueError('too late')",
      "ValueError: too late",
    ),
    ("def get_config():\n  return {}['total_stepz']", "total_stepz"),
  ],
)
def test_a_config_file_that_fails_is_named_with_the_reason(
  code, hint, tmp_path
):
  (tmp_path / "mine.py").write_text(code + "\n")
  done = train(f"--config={tmp_path / 'mine.py'}", f"--workdir={tmp_path}/run")
  assert_one_line(done, 2)
  assert hint in done.stderr and f"{tmp_path / 'mine.py'}" in done.stderr


@pytest.mark.parametrize("where", ["file/run", "/proc/run"])
def test_a_work_directory_that_cannot_be_written_is_refused(where, tmp_path):
  (tmp_path / "file").write_text("in the way")
  done = train(f"--workdir={tmp_path / where}")
  assert_one_line(done, 2)
  assert "cannot be written" in done.stderr
  assert runs.files(tmp_path) == {"file": b"in the way"}


def test_a_changed_config_is_refused_and_nothing_is_lost(tmp_path):
  assert train(*SMALL, f"--workdir={tmp_path}").returncode == 0
  before = runs.files(tmp_path)
  done = train(*SMALL, f"--workdir={tmp_path}", "--config.seed=7")
  assert_one_line(done, 2)
  assert "seed: 0 -> 7" in done.stderr
  assert runs.files(tmp_path) == before


def test_a_loss_that_is_not_finite_stops_the_run_and_says_where(tmp_path):
  """Rounds of one step: what the second one sends is out of range."""
  done = train(
    *SMALL,
    f"--workdir={tmp_path}",
    "--config.sync.sync_interval=1",
    "--config.checkpoint.interval_steps=1",
    "--config.inner.learning_rate=1e30",
    "--config.inner.clip_norm=0",
  )
  errors = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
  assert done.returncode == 1, done.stderr
  assert len(errors) == 1 and done.stderr.splitlines()[-1] == errors[0]
  assert "Traceback" not in done.stderr
  assert "at step 2 on replica 0" in errors[0]
  assert "inner.learning_rate=1e+30" in errors[0]
  _, record = runs.saved(tmp_path)
  assert record["position"]["step"] == 1
  assert [row["step"] for row in runs.rows(tmp_path, "round")] == [1]


STOPS = """
from dilocox_jax.metrics import RecordError
from experiments.runtime import command_line

def stop(values):
  raise {}

command_line.main(stop, lambda: None)
"""


@pytest.mark.parametrize(
  "error, code, said",
  [
    ("KeyboardInterrupt", 130, "interrupted"),
    ("RecordError('x.jsonl line 3')", 1, "x.jsonl line 3"),
  ],
)
def test_what_stops_a_binary_is_one_line(error, code, said):
  done = subprocess.run(
    [sys.executable, "-c", STOPS.format(error)],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == code
  assert done.stderr.splitlines() == [f"error: {said}"]


VOID = {
  "size of a tokenizer that is not trained": (
    "prepare_data",
    ["--glob=*.txt", "--vocab_size=400"],
    "--vocab_size needs --tokenizer=bpe",
  ),
  "seed of nothing": (
    "prepare_data",
    ["--glob=*.txt", "--seed=3"],
    "--seed needs --shuffle_buffer",
  ),
  "config beside a run": (
    "simulate",
    ["--run=nowhere", CONFIG.format("diloco")],
    "leave out --config",
  ),
  "field beside a run": (
    "simulate",
    ["--run=nowhere", "--config.sync.sync_interval=7"],
    "leave out --config",
  ),
  "methods beside a run": (
    "simulate",
    ["--run=nowhere", "--methods=all"],
    "--methods needs to simulate a config, without --run",
  ),
}


@pytest.mark.parametrize("case", VOID)
def test_a_flag_that_nothing_reads_is_refused(case, tmp_path):
  binary, arguments, said = VOID[case]
  done = subprocess.run(
    [sys.executable, "-m", f"experiments.{binary}", *arguments]
    + [f"--workdir={tmp_path / 'out'}"],
    capture_output=True,
    text=True,
    check=False,
  )
  assert_one_line(done, 2)
  assert said in done.stderr
  assert runs.files(tmp_path) == {}


def test_a_cluster_of_another_size_says_what_to_set(tmp_path):
  done = train(
    "--cluster=experiments/clusters/example.json", f"--workdir={tmp_path}"
  )
  assert_one_line(done, 2)
  assert "set mesh.num_replicas=" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_a_reader_that_leaves_ends_a_program_without_a_traceback(arguments):
  code = "from experiments.runtime import command_line\n"
  code += "command_line.main(lambda _: print('x' * 10**6), lambda: None)"
  with subprocess.Popen(
    [sys.executable, "-c", code, *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as process:
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
  assert process.returncode == 141


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_streams_that_are_closed_lead_to_nowhere(tmp_path, arguments):
  code = f"""
from experiments.runtime import command_line

def work(values):
  print("to nobody")
  with open({str(tmp_path / "number")!r}, "w") as file:
    file.write(str(file.fileno()))

command_line.main(work, lambda: None)
"""
  shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
  python = [sys.executable, "-c", code, *arguments]
  assert subprocess.run(shell + python, check=False).returncode == 0
  if not arguments:  # Else a library's words would end up in the file.
    assert int((tmp_path / "number").read_text()) > 2


def test_a_cache_whose_name_is_not_utf_8_is_refused(monkeypatch):
  monkeypatch.setenv(running.CACHE_VARIABLE, "/tmp/caf\udce9")
  with pytest.raises(UsageError, match="caf.* not named in UTF-8: set DILOCOX"):
    running.set_up_jax()


def test_another_pipe_that_breaks_is_no_closed_output():
  code = "from experiments.runtime import command_line\n"
  code += "def fail(_): raise BrokenPipeError('a carrier')\n"
  code += "command_line.main(fail, lambda: None)"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=False
  )
  assert done.returncode == 1 and "a carrier" in done.stderr


def test_short_help_is_help():
  done = train("-h")
  assert done.returncode == 0 and "--workdir" in done.stdout
