import pytest

from dilocox_jax.report import write_report
from experiments.runtime import running, samples
from experiments.runtime.samples import Draw
from tests import runs


@pytest.fixture(scope="module", name="run")
def run_fixture(tmp_path_factory):
  folder = tmp_path_factory.mktemp("texts")
  for number in range(40):
    (folder / f"{number}.txt").write_text("abcd" * 40 + str(number))
  workdir = tmp_path_factory.mktemp("run")
  text = {"source": "text_files", "glob": f"{folder}/*.txt"}
  runs.train(runs.settings(data=text, total_steps=6), workdir)
  return workdir


def test_a_sample_continues_the_prompt_and_stands_in_the_report(run):
  assert "## A sample" not in write_report(run).read_text()
  draw = Draw("abc", num_tokens=7, temperature=0)
  text = samples.add_sample(run, draw)
  assert text.startswith("abc") and len(text) >= 7
  assert samples.add_sample(run, draw) == text
  report = (run / "report.md").read_text()
  assert "## A sample" in report and "    abc" in report


def test_without_a_prompt_the_validation_text_is_continued(run):
  """Its model has no words yet, but the text before them is held out."""
  text = samples.add_sample(run, Draw(num_tokens=3))
  assert "abcdabcd" in text


def test_what_cannot_be_continued_says_why(run, tmp_path):
  with pytest.raises(ValueError, match="the prompt is empty: there is nothing"):
    samples.add_sample(run, Draw(""))
  with pytest.raises(ValueError, match="is not a run directory"):
    samples.add_sample(tmp_path, Draw())


@pytest.mark.slow
def test_a_run_on_tokens_without_text_ends_well_without_a_sample(
  tmp_path, capsys
):
  runs.train(runs.settings(total_steps=3), tmp_path)
  running._sample(tmp_path, 5)
  assert "no sample in the report: the text has no" in capsys.readouterr().out
