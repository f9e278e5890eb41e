"""Runs to compile for absent TPUs or GPUs; the name follows the colon.

experiments.fits reports what each run needs. The 107B runs train the model of
`papers.py`, but with batches of 256 sequences. They are meant for two slices of
128 chips. A replica then has 32 stages of 4 chips, or 16 stages of 8 chips.
Cost: minutes of one CPU core for 107B, half a minute for `tiny`.

    python -m experiments.fits --workdir=runs/compiled --compile=v5e:2x2 \
        --config=experiments/configs/compiled.py:tiny_dilocox
"""

from experiments.configs import default

_TINY = {"mesh.num_stages": 2, "mesh.num_data_shards": 2}
_DILOCOX = {"sync.method": "dilocox", "sync.rule": "continue"}
_RANK_64 = {"exchange.codec": "low_rank(rank=64)+int(bits=4)"}
_RANK_2048 = {"exchange.codec": "low_rank(rank=2048)+int(bits=4)"}
_DELAYED = {
  "sync.method": "delayed",
  "sync.rule": "continue",
  "sync.overlap_steps": 30,
}
_107B = {
  "total_steps": 4000,
  "model.preset": "qwen_107b",
  "model.compute_dtype": "bfloat16",
  "data.sequence_length": 2048,
  "data.batch_size": 256,
  "inner.accumulate_steps": 64,
  "mesh.num_stages": 32,
  "mesh.num_data_shards": 4,
  "mesh.remat": "full",
}
_WIDER = {
  "mesh.num_stages": 16,
  "mesh.num_data_shards": 8,
  "inner.accumulate_steps": 32,
}
_ROUND = {"sync.sync_interval": 125}
_OPT = {
  "total_steps": 4000,
  "model.preset": "opt_1_3b",
  "model.compute_dtype": "bfloat16",
  "data.sequence_length": 2048,
  "data.batch_size": 32,
  "inner.accumulate_steps": 8,
  "sync.sync_interval": 125,
  "mesh.num_stages": 4,
  "mesh.num_data_shards": 4,
  "mesh.remat": "full",
}
_LLAMA = {
  "total_steps": 4000,
  "model.compute_dtype": "bfloat16",
  "data.sequence_length": 4096,
  "sync.method": "diloco",
  "sync.sync_interval": 100,
  "mesh.remat": "full",
}
_LLAMA_7B = _LLAMA | {"model.preset": "llama_7b", "data.batch_size": 8}
_LLAMA_13B = _LLAMA | {"model.preset": "llama_13b", "data.batch_size": 64}
_STREAMING = {
  "sync.method": "streaming_diloco",
  # Nine fragments are sent 15 steps apart. With tau = 15 a fragment is applied
  # on the step on which the next one is sent. So a window has one loop over
  # inner steps and not two. The compiler would compile each loop separately.
  "sync.sync_interval": 135,
  "exchange.codec": "e3m0",
}
COMPILED = {
  "tiny_delayed": _TINY | _DELAYED | {"sync.sync_interval": 30},
  "tiny_diloco": _TINY | {"sync.method": "diloco", "sync.sync_interval": 30},
  "tiny_dilocox": _TINY | _DILOCOX | {"sync.sync_interval": 30},
  "dilocox_107b": _107B | _ROUND | _DILOCOX | _RANK_2048,
  "dilocox_107b_16x8": _107B | _ROUND | _DILOCOX | _RANK_2048 | _WIDER,
  "allreduce_107b": _107B | {"sync.method": "allreduce"},
  "overlap_loco_107b": _107B
  | {"sync.method": "overlap_loco", "sync.fragment_order": "interleaved"},
  "dilocox_opt_1_3b": _OPT | _DILOCOX | _RANK_64,
  "diloco_opt_1_3b": _OPT | {"sync.method": "diloco"},
  "diloco_llama_7b": _LLAMA_7B | {"mesh.num_data_shards": 8},
  "diloco_llama_7b_tensor": _LLAMA_7B
  | {"mesh.num_data_shards": 2, "mesh.num_tensor_shards": 4},
  "diloco_llama_13b": _LLAMA_13B | {"mesh.num_data_shards": 64},
  "streaming_opt_1_3b": _OPT
  | _STREAMING
  | {"sync.num_fragments": 9, "sync.overlap_steps": 15},
}


def get_config(name="tiny_dilocox"):
  """Returns the config of a run to compile, one of `COMPILED`."""
  if name not in COMPILED:
    raise ValueError(f"{name!r} must be one of {', '.join(COMPILED)}")
  config = default.get_config()
  config.model.scan_unroll = 1
  config.mesh.layout = "mesh"
  config.update_from_flattened_dict(COMPILED[name])
  return config
