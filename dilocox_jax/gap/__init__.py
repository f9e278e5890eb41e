"""Predicts how far M replicas end above AllReduce's loss, without training.

`expected.expected_gap` predicts this gap. `gain` has the one number that the
prediction needs of a text and a model. `law` has the constants of the law with
their sources.
"""
