"""Without a coordinator; several processes stand in test_host_arrays.py."""

from dilocox_jax.distributed import coordinator_store


def test_a_process_that_is_alone_hears_itself():
  assert coordinator_store.allgather(b"own") == [b"own"]
