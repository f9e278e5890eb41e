"""Packages the library; the programs in `experiments` run from a clone."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
# Address of the project. It stands for a web address until there is one.
REPOSITORY = "REPOSITORY"

# What transforms, rounds and mailboxes in a folder import.
CORE = [
  "chex>=0.1.92",
  "jax>=0.10.0",
  "jaxtyping>=0.3.11",
  "ml-dtypes>=0.5",
  "numpy>=2.4",
  "optax>=0.2.8",
]

# Pages, tables and figures of runs.
REPORT = [
  "markdown-it-py>=4.0",
  "matplotlib>=3.11",
  "pandas>=3.1",
  "rich>=15.0",
]

# Complete runs: `dilocox_jax.train`, `load`, `estimate` and `compare_methods`.
TRAIN = [
  "flax>=0.12.8",
  "grain>=0.2.18",
  "orbax-checkpoint>=0.12.8",
  *REPORT,
]

# Replicas that meet in a bucket of S3, Google Cloud or Azure.
MAILBOX = ["obstore>=0.12"]

# Where a run writes its rows beside its own files.
TENSORBOARD = ["tensorboardX>=2.6"]
WANDB = ["wandb>=0.22"]

# The programs of a clone.
EXPERIMENTS = ["absl-py>=2.5", "ml-collections>=1.1", *TRAIN, *MAILBOX]

DEV = [
  "beartype>=0.23",
  "cosmic-ray>=8.7",
  "equinox>=0.13.8",
  "hypothesis>=6.170",
  "import-linter>=2.16",
  "pyrefly>=1.5",
  # The extra brings its own Node.js, so the machine needs none.
  "pyright[nodejs]>=1.1.414",
  "pytest>=9.2",
  "pytest-timeout>=2.4",
  "pytest-xdist>=3.8",
  "PyYAML>=6.0",
  "ruff>=0.17.6",
  # Listed so that its version is pinned: wheels are built without isolation.
  "setuptools>=77",
  # Reads what tensorboardX has written.
  "tensorboard>=2.20",
]

# Tokenisers other than bytes, and files compressed by zstd.
TEXT = ["backports.zstd>=1.0", "tokenizers>=0.23"]

# Checkpoints of OPT, Llama and Qwen2 that other libraries read and write.
WEIGHTS = ["safetensors>=0.6"]

# The library whose logits and parameters the tests of weights compare with.
TRANSFORMERS = ["torch>=2.8", "transformers>=5.0", "peft>=0.17"]

# The bench that compares rounds with PyTorch's.
PEERS = ["torch>=2.8"]

DOCS = [
  "furo>=2025.12",
  "myst-parser>=5.1",
  "sphinx>=9.0",
  "sphinx-copybutton>=0.5.2",
]


def version() -> str:
  """Returns `dilocox_jax.__version__`, read without importing the package."""
  text = (ROOT / "dilocox_jax" / "__init__.py").read_text()
  match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
  if match is None:
    raise RuntimeError("dilocox_jax/__init__.py has no line __version__")
  return match.group(1)


def readme() -> str:
  """Returns README.md with links that also work outside of the repository."""
  text = (ROOT / "README.md").read_text()
  return re.sub(r"\]\((?!\w+:|#)", f"]({REPOSITORY}/blob/main/", text)


setup(
  name="dilocox_jax",
  version=version(),
  description="Low-communication training of language models in JAX and Flax",
  long_description=readme(),
  long_description_content_type="text/markdown",
  author="The dilocox_jax authors",
  license="Apache-2.0",
  license_files=["LICENSE"],
  project_urls={
    "Source": REPOSITORY,
    "Documentation": f"{REPOSITORY}/tree/main/docs",
    "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
  },
  keywords=["DiLoCo", "distributed training", "JAX", "optax", "low bandwidth"],
  classifiers=[
    "Development Status :: 4 - Beta",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
  python_requires=">=3.11",
  packages=find_packages(include=["dilocox_jax", "dilocox_jax.*"]),
  package_data={
    "dilocox_jax": ["__init__.pyi", "py.typed"],
    "dilocox_jax.api": ["measured_gaps.json"],
    "dilocox_jax.gap": ["law.json"],
    "dilocox_jax.simulate": ["presets.json"],
  },
  install_requires=CORE,
  extras_require={
    "dev": DEV + EXPERIMENTS + TEXT + WEIGHTS + TENSORBOARD + WANDB,
    "docs": DOCS,
    "experiments": EXPERIMENTS,
    "gpu": ["jax[cuda12]>=0.10.0"],
    "mailbox": MAILBOX,
    "peers": PEERS,
    "report": REPORT,
    "tensorboard": TENSORBOARD,
    "text": TEXT,
    "tpu": ["jax[tpu]>=0.10.0"],
    "train": TRAIN,
    "transformers": TRANSFORMERS,
    "wandb": WANDB,
    "weights": WEIGHTS,
  },
)
