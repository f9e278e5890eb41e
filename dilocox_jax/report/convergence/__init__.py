"""The report of a convergence sweep: tables, figures and orderings."""
