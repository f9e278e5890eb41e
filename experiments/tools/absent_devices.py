"""Describes TPUs and GPUs to compile for, which this machine need not have.

The compiler for TPUs is in the package libtpu. The compiler for GPUs comes with
JAX's CUDA plugin, and reads the properties of a GPU from a text that this
module writes. A *slice* is a group of devices that are joined by fast links:
some TPUs of a pod, or the GPUs of one or more hosts.
"""

import importlib.util
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.experimental import topologies

from dilocox_jax.checks import require

LIBTPU = "libtpu==0.0.42"
# Memory that a program may use (GiB), by kind of TPU. The compiler in `LIBTPU`
# prints the number if a program does not fit.
_TPU_MEMORY_GIB = {
  "TPU v4": 30.75,
  "TPU v5": 95.74,
  "TPU v5p": 95.74,
  "TPU v5 lite": 15.75,
  "TPU v6 lite": 31.25,
}
# Environment variables of libtpu. Without them libtpu would ask the machine of
# a real TPU for their values.
_TPU_ENVIRONMENT = {
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-256",
  "TPU_SKIP_MDS_QUERY": "1",
  # Two processes may load the compiler at once, because neither takes a chip.
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Gpu(NamedTuple):
  """Properties of a kind of GPU that XLA's compiler reads.

  The values are those of OpenXLA's descriptions of GPUs
  (`third_party/README.md`).

  Attributes:
    name: Name that the driver has for the GPU.
    compute_capability: Major version of the instruction set, e.g. 9 for Hopper.
    memory_bytes: Memory of the GPU (bytes).
    memory_bandwidth: Rate of the memory (bytes/s).
    core_count: Number of streaming multiprocessors.
    fpus_per_core: Number of float32 units of each multiprocessor.
    clock_ghz: Highest clock rate (GHz).
    l2_cache_bytes: Size of the second-level cache (bytes).
    shared_memory_bytes: Shared memory of a multiprocessor (bytes).
    block_memory_bytes: Shared memory that one block may ask for (bytes).
  """

  name: str
  compute_capability: int
  memory_bytes: int
  memory_bandwidth: int
  core_count: int
  fpus_per_core: int
  clock_ghz: float
  l2_cache_bytes: int
  shared_memory_bytes: int
  block_memory_bytes: int


_A100 = Gpu(
  name="NVIDIA A100-SXM4-80GB",
  compute_capability=8,
  memory_bytes=85_100_068_864,
  memory_bandwidth=2_039_040_000_000,
  core_count=108,
  fpus_per_core=64,
  clock_ghz=1.41,
  l2_cache_bytes=41_943_040,
  shared_memory_bytes=167_936,
  block_memory_bytes=166_912,
)
_H100 = Gpu(
  name="NVIDIA H100 80GB HBM3",
  compute_capability=9,
  memory_bytes=84_942_979_072,
  memory_bandwidth=3_352_320_000_000,
  core_count=132,
  fpus_per_core=128,
  clock_ghz=1.98,
  l2_cache_bytes=52_428_800,
  shared_memory_bytes=233_472,
  block_memory_bytes=232_448,
)
# An H100 with other memory.
_H200 = _H100._replace(
  name="NVIDIA H200 141GB HBM3e",
  memory_bytes=151_397_597_184,
  memory_bandwidth=4_800_000_000_000,
)
GPUS = {"a100": _A100, "h100": _H100, "h200": _H200}
_GPU_PATTERN = re.compile(r"(\w+):(\d+)(?:x(\d+))?")


class AbsentDevices(NamedTuple):
  """Devices of slices (groups with fast links) that this machine need not have.

  Attributes:
    devices: The devices, slice by slice, as JAX describes devices that it can
      only compile for.
    platform: "tpu" or "gpu".
    memory_bytes: Memory of a device that a program may use (bytes).
  """

  devices: Sequence[Any]
  platform: str
  memory_bytes: int


def is_tpu_compiler_installed() -> bool:
  """Whether the compiler for TPUs (libtpu) is installed."""
  return importlib.util.find_spec("libtpu") is not None


def is_gpu_compiler_installed() -> bool:
  """Whether JAX's CUDA plugin, with the compiler for GPUs, is installed."""
  return _cuda_plugin() is not None


def absent_devices(topology: str, num_slices: int) -> AbsentDevices:
  """Returns devices to compile for, which this machine need not have.

  A *slice* is a group of devices that are joined by fast links. The function
  sets environment variables that the compiler reads.

  Args:
    topology: Kind and size of a slice. TPUs: the edges of the slice, e.g.
      "v5p:4x4x8". GPUs: the number of GPUs of one host, e.g. "h100:8", or the
      numbers of hosts and of GPUs of each host, e.g. "h100:4x8".
    num_slices: Number of slices.

  Raises:
    ValueError: If the compiler is missing or knows no such slice, if `topology`
      has another form, or if the memory of the TPUs is not known here.
  """
  kind = topology.partition(":")[0]
  if kind in GPUS:
    return _gpus(topology, num_slices)
  return _tpus(topology, num_slices)


def _tpus(topology: str, num_slices: int) -> AbsentDevices:
  """Returns the devices of slices of TPUs, e.g. of "v5p:4x4x8".

  Errors are those of `absent_devices`.
  """
  require(
    is_tpu_compiler_installed(),
    "the compiler for TPUs is not installed: run `make compile-report`, which"
    f" makes an environment with it, or install {LIBTPU!r} into your own",
  )
  for variable, value in _TPU_ENVIRONMENT.items():
    os.environ.setdefault(variable, value)

  def description() -> Any:
    return topologies.get_topology_desc(
      topology, platform="tpu", num_slices=num_slices
    )

  slices = _known_topology(description, topology, num_slices)

  def slice_and_id(device: Any) -> tuple[int, int]:
    # Devices of a lone slice have no index of the slice.
    return getattr(device, "slice_index", 0), device.id

  devices = sorted(slices.devices, key=slice_and_id)
  kind = devices[0].device_kind
  require(kind in _TPU_MEMORY_GIB, f"the memory of {kind!r} is not known here")
  memory_bytes = round(_TPU_MEMORY_GIB[kind] * 2**30)
  return AbsentDevices(devices, platform="tpu", memory_bytes=memory_bytes)


def _gpus(topology: str, num_slices: int) -> AbsentDevices:
  """Returns the GPUs of slices (groups of hosts), e.g. "h100:8" or "h100:4x8".

  Errors are those of `absent_devices`.
  """
  match = _GPU_PATTERN.fullmatch(topology)
  require(
    match is not None,
    f"--compile={topology}: write a kind and the number of GPUs of a host, e.g."
    " h100:8, or the numbers of hosts and of GPUs of each, e.g. h100:4x8",
  )
  plugin = _cuda_plugin()
  require(
    plugin is not None,
    "the compiler for GPUs is not installed: run `make compile-report-gpu`,"
    " which makes an environment with it, or install 'jax[cuda12]' into your"
    " own",
  )
  # Both were checked above; a type checker does not know that.
  assert match is not None
  assert plugin is not None
  kind, first, second = match.groups()
  num_hosts, gpus_per_host = (first, second) if second else ("1", first)
  # The compiler would time its kernels on a GPU, and here is none.
  os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
  )
  gpu = GPUS[kind]

  def description() -> Any:
    # JAX's public function wants a GPU that it can ask for its properties.
    from jax._src.lib import xla_client

    if not xla_client.pjrt_plugin_loaded("cuda"):
      xla_client.load_pjrt_plugin_dynamically("cuda", str(plugin))
    if not xla_client.pjrt_plugin_initialized("cuda"):
      xla_client.initialize_pjrt_plugin("cuda")
    options = {
      "target_config": _gpu_description(gpu),
      "topology": f"{num_slices}x{num_hosts}x{gpus_per_host}",
    }
    return xla_client._xla.get_default_c_api_topology("cuda", "", options)

  slices = _known_topology(description, topology, num_slices)
  devices = slices._make_compile_only_devices()
  return AbsentDevices(devices, platform="gpu", memory_bytes=gpu.memory_bytes)


def _known_topology(
  description: Callable[[], Any], topology: str, num_slices: int
) -> Any:
  """Returns the result of `description`, which asks the compiler about slices.

  If `description` fails, raises ValueError, whose message names `topology` and
  `num_slices`.
  """
  try:
    return description()
  except Exception as error:  # The compilers raise several kinds.
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ValueError(
      f"--compile={topology} with --slices={num_slices} is not known to the "
      f"compiler ({reason[:160]}): take one such as v5e:2x2, v5p:4x4x8 or "
      "h100:8"
    ) from error


def _cuda_plugin() -> pathlib.Path | None:
  """Returns the path of JAX's CUDA plugin; None if it is not installed."""
  for name in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
    try:
      spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # There is no package `jax_plugins`.
      return None
    if spec is not None and spec.origin is not None:
      return pathlib.Path(spec.origin).parent / "xla_cuda_plugin.so"
  return None


def _gpu_description(gpu: Gpu) -> str:
  """Returns a GPU's properties as text, a `GpuTargetConfigProto` of XLA.

  Properties that all of `GPUS` share are written in the text itself.
  """
  return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_bytes}
  threads_per_core_limit: 2048
  core_count: {gpu.core_count}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.memory_bandwidth}
  l2_cache_size: {gpu.l2_cache_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  shared_memory_per_block_optin: {gpu.block_memory_bytes}
  cuda_compute_capability {{ major: {gpu.compute_capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {gpu.compute_capability}.0"
  device_address_bits: 64
  name: "{gpu.name}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""
