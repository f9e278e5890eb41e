"""The flag --run: a run that is finished or under way.

A program that has the flag marks it as required.
"""

from absl import flags

from experiments.runtime import own_parts

RUN = flags.DEFINE_string("run", None, "Directory of the run.")
# A run may have parts of the user's own.
flags.adopt_module_key_flags(own_parts)
