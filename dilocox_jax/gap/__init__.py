"""Predicts how far the loss of M replicas ends above AllReduce's loss.

`expected.expected_gap` predicts this gap without training. `gain` computes the
one number that the prediction needs of a text and a model. `law` has the
constants of the prediction with their sources.
"""
