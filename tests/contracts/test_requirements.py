"""What setup.py declares is what the code imports."""

import ast
import importlib.metadata
import pathlib
import re
import runpy
import sys

import pytest
import setuptools

import dilocox_jax as dx

ROOT = pathlib.Path(__file__).resolve().parents[2]
OURS = {"dilocox_jax", "experiments", *sys.stdlib_module_names}
# An import belongs to a package that may have another name.
DISTRIBUTIONS = importlib.metadata.packages_distributions()


@pytest.fixture(scope="module", name="declared")
def declared_fixture():
  """Arguments with which setup.py calls `setup`."""
  arguments = {}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(setuptools, "setup", lambda **each: arguments.update(each))
    runpy.run_path(str(ROOT / "setup.py"))
  return arguments


def package_names(requirements):
  """Names of the packages of some requirements, as imports are compared."""
  return {
    re.split(r"[^\w.-]", requirement)[0].replace("_", "-").lower()
    for requirement in requirements
  }


def imported_packages(folder):
  """Every package that a folder imports, with a file that imports it."""
  imported = {}
  for path in sorted((ROOT / folder).rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      names = []
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [str(node.module)]
      for name in names:
        module = name.partition(".")[0]
        if module in OURS:
          continue
        (package,) = package_names(DISTRIBUTIONS.get(module, [module])[:1])
        imported[package] = path.relative_to(ROOT)
  return imported


# Packages that are imported by name in strings (`checks.extra_package`) are
# those of the extras `text`, `weights`, `tensorboard` and `wandb`.
@pytest.mark.parametrize(
  ("folder", "extras"),
  [("dilocox_jax", ["train", "mailbox"]), ("experiments", ["experiments"])],
)
def test_every_import_is_declared(declared, folder, extras):
  allowed = package_names(declared["install_requires"])
  for extra in extras:
    allowed |= package_names(declared["extras_require"][extra])
  imported = imported_packages(folder)
  assert {n: p for n, p in imported.items() if n not in allowed} == {}


def test_every_package_of_the_core_and_of_train_is_imported(declared):
  declared_names = package_names(
    declared["install_requires"] + declared["extras_require"]["train"]
  )
  assert declared_names <= set(imported_packages("dilocox_jax"))


def test_the_environment_of_developers_has_every_extra_but_the_large_ones(
  declared,
):
  extras = declared["extras_require"]
  developers = set(extras["dev"])
  large = {"docs", "gpu", "peers", "tpu", "transformers"}
  for extra in set(extras) - large:
    assert set(extras[extra]) <= developers


@pytest.mark.parametrize("version", ["py311", "py312"])
def test_every_package_of_developers_is_pinned(declared, version):
  lines = (ROOT / "constraints" / f"{version}.txt").read_text().splitlines()
  pinned = package_names(line for line in lines if "==" in line)
  extras = declared["extras_require"]
  needed = package_names(
    declared["install_requires"] + extras["dev"] + extras["docs"]
  )
  assert needed <= pinned


def test_the_version_stands_in_one_place(declared):
  assert declared["version"] == dx.__version__
  citation = (ROOT / "CITATION.cff").read_text()
  assert f"\nversion: {dx.__version__}\n" in citation


def test_links_of_the_long_description_leave_the_page(declared):
  links = re.findall(r"\]\(([^)]+)\)", declared["long_description"])
  assert links
  whole = "REPOSITORY/", "https://"
  assert [link for link in links if not link.startswith(whole)] == []
