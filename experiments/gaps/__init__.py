"""A study of the gap: how far the loss of replicas ends above AllReduce's.

`experiments.train_gaps` measures the gap in many small runs,
`experiments.fit_gaps` fits a law to them, and `experiments.gap` predicts the
gap of a planned run.
"""
