"""The flag --run: the directory of a run that is finished or under way."""

from absl import flags

from experiments.runtime import parts_flag

RUN = flags.DEFINE_string("run", None, "Directory of the run.", required=True)
# A run may have methods or codecs that the user has registered (--parts).
flags.adopt_module_key_flags(parts_flag)
