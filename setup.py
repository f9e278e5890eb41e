"""Packages the library; the experiments run from a clone."""

from setuptools import find_packages, setup

RUNTIME = [
  "absl-py>=2.5",
  "chex>=0.1.92",
  "flax>=0.12.8",
  "grain>=0.2.18",
  "jax>=0.10.0",
  "jaxtyping>=0.3.11",
  "matplotlib>=3.11",
  "ml-collections>=1.1",
  "ml-dtypes>=0.5",
  "numpy>=2.4",
  "obstore>=0.12",
  "optax>=0.2.8",
  "orbax-checkpoint>=0.12.8",
  "rich>=15.0",
]

DEV = [
  "beartype>=0.23",
  "cosmic-ray>=8.7",
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

setup(
  name="dilocox_jax",
  version="0.1.0",
  description="Low-communication training of language models in JAX and Flax",
  license="Apache-2.0",
  license_files=["LICENSE"],
  python_requires=">=3.11",
  packages=find_packages(include=["dilocox_jax", "dilocox_jax.*"]),
  package_data={
    "dilocox_jax.api": ["measured_gaps.json"],
    "dilocox_jax.simulate": ["presets.json"],
  },
  install_requires=RUNTIME,
  extras_require={
    "dev": DEV + TEXT + WEIGHTS,
    "docs": DOCS,
    "gpu": ["jax[cuda12]>=0.10.0"],
    "peers": PEERS,
    "text": TEXT,
    "tpu": ["jax[tpu]>=0.10.0"],
    "transformers": TRANSFORMERS,
    "weights": WEIGHTS,
  },
)
