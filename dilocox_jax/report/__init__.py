"""Reports of runs: pages in Markdown and HTML, with tables and pictures."""

from dilocox_jax.report.comparison import side_by_side as side_by_side
from dilocox_jax.report.page import SAMPLE as SAMPLE
from dilocox_jax.report.page import write_report as write_report
from dilocox_jax.report.run import load_run as load_run
