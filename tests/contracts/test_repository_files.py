"""Files that services read: they parse, and agree with the repository."""

import pathlib
import re

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
WORKFLOW = ".github/workflows/ci.yml"
TEMPLATES = ("bug", "question")


def load(path):
  return yaml.safe_load((ROOT / path).read_text())


def commands(job):
  return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_runs_what_must_hold_before_a_change_lands():
  jobs = load(WORKFLOW)["jobs"]
  assert commands(jobs["test"]) == ["bash .ci/run"]
  (docs,) = commands(jobs["docs"])
  assert docs.startswith("make docs")


def test_the_workflow_tests_the_versions_that_have_pinned_packages():
  versions = load(WORKFLOW)["jobs"]["test"]["strategy"]["matrix"]["python"]
  pinned = {path.stem for path in (ROOT / "constraints").glob("py*.txt")}
  assert {"py" + version.replace(".", "") for version in versions} == pinned


def test_make_takes_the_python_of_the_workflow():
  (step,) = [
    step
    for step in load(WORKFLOW)["jobs"]["test"]["steps"]
    if step.get("run") == "bash .ci/run"
  ]
  (variable,) = step["env"]
  assert re.search(rf"^{variable} \?=", (ROOT / "Makefile").read_text(), re.M)


def test_the_site_is_built_from_the_config_and_the_extra_of_make_docs():
  config = load(".readthedocs.yaml")
  assert config["version"] == 2
  assert (ROOT / config["sphinx"]["configuration"]).exists()
  assert config["sphinx"]["fail_on_warning"] is True
  (install,) = config["python"]["install"]
  assert install["extra_requirements"] == ["docs", "experiments"]


def test_an_image_gets_no_secret_of_a_run():
  assert "**/*.secret" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_an_issue_has_fields_with_labels(name):
  template = load(f".github/ISSUE_TEMPLATE/{name}.yml")
  assert template["name"] and template["description"]
  fields = [field["id"] for field in template["body"]]
  assert len(fields) == len(set(fields))
  assert all(field["attributes"]["label"] for field in template["body"])
  assert any(
    field.get("validations", {}).get("required") for field in template["body"]
  )


@pytest.mark.parametrize("version", ["311", "312"])
def test_commits_are_checked_by_the_pinned_ruff(version):
  (repo,) = load(".pre-commit-config.yaml")["repos"]
  pins = (ROOT / f"constraints/py{version}.txt").read_text()
  (pinned,) = re.findall(r"^ruff==(\S+)$", pins, re.MULTILINE)
  assert repo["rev"] == f"v{pinned}"
  hooks = [hook["id"] for hook in repo["hooks"]]
  assert hooks == ["ruff-check", "ruff-format"]
