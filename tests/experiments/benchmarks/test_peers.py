import os
import sys
from typing import cast

import numpy as np
import pytest

from experiments.benchmarks import peers
from experiments.runtime.running import CACHE_VARIABLE
from tests.experiments.benchmarks.test_peer_decoder import SMALL


def test_rounds_of_two_models_are_not_compared():
  torch = pytest.importorskip("torch")
  rounds = peers.Rounds(SMALL)
  assert rounds.num_tokens == 2 * 4 * 4 * 8
  rounds._params["final_norm/scale"] = 2 * rounds._params["final_norm/scale"]
  with pytest.raises(RuntimeError, match="PyTorch trains another model"):
    rounds.peer(compiled=False)
  assert torch.get_num_threads() == len(os.sched_getaffinity(0))


def test_codecs_of_both_sides_compute_the_same_means(monkeypatch):
  pytest.importorskip("torch")
  monkeypatch.setattr(peers, "_VALUES", peers.Leaf(2, (16, 128)))
  for ratio in peers._codec_ratios("eager"):
    ours, theirs = np.asarray(ratio.measured()), np.asarray(ratio.baseline())
    # One step of 8 bits is at most 5 / 127; one bit has no peer but 8 bits.
    bound = 0.02 if "int1" not in ratio.name else 5
    np.testing.assert_allclose(
      ours.reshape(-1), theirs.reshape(-1), rtol=0, atol=bound
    )


def test_both_checkpoints_bring_back_the_state(tmp_path, monkeypatch):
  pytest.importorskip("torch")
  monkeypatch.setattr(peers, "peer_config", lambda preset: SMALL)
  with peers._checkpoint_ratios("nano", tmp_path) as (saving, restoring):
    for _ in range(2):
      saving.measured()
      saving.baseline()
    state, _ = cast(tuple, restoring.measured())
    leaves = peers.leaves_by_path(state)
    theirs = cast(dict, restoring.baseline())
  assert leaves.keys() == theirs.keys()
  for path, leaf in leaves.items():
    np.testing.assert_array_equal(leaf, theirs[path].numpy())
  assert not list(tmp_path.glob("*.partial"))


def test_a_command_is_timed_until_something_happens_and_then_ended(
  tmp_path, monkeypatch
):
  (tmp_path / "started.py").write_text(
    "import os, pathlib, time\n"
    f"pathlib.Path(os.environ['{CACHE_VARIABLE}']).write_text('here')\n"
    "time.sleep(60)\n"
  )
  here = tmp_path / "here"
  monkeypatch.chdir(tmp_path)
  seconds = peers._seconds_until(["started"], here.exists, here)
  assert here.read_text() == "here" and seconds < 50
  with pytest.raises(RuntimeError, match="missing failed: run it by hand"):
    peers._seconds_until(["missing"], lambda: False, here)


@pytest.mark.slow
def test_the_first_round_begins_before_the_run_is_over(tmp_path):
  seconds = peers._first_dispatch_s(tmp_path / "run", tmp_path / "cache")
  assert seconds > 0 and not (tmp_path / "run" / "report.md").exists()


def test_without_a_compiler_its_rows_are_left_out(monkeypatch, capsys):
  monkeypatch.setattr(peers.shutil, "which", lambda name: None)
  assert peers._modes() == ["eager"]
  assert "no C++ compiler" in capsys.readouterr().out
  monkeypatch.setattr(peers.shutil, "which", lambda name: sys.executable)
  assert peers._modes() == ["eager", "compiled"]


def test_a_row_has_both_times_and_a_start_has_one():
  row = {"measured_s": 2.0, "baseline_s": 4.0, "median": 0.5, "min": 0.4}
  row |= {"max": 0.6, "bound": 0.8}
  table = peers._table({"round": row}, {"--help": [1.0, 3.0, 2.0]})
  cells = [list(column.cells) for column in table.columns]
  assert cells[:4] == [["round", "--help"], ["2", "2"], ["4", ""], ["0.5", ""]]
  assert cells[-1] == ["0.8", ""]
