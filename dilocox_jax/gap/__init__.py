"""Predicts how far the loss of M replicas ends above AllReduce's loss.

`expected.expected_gap` predicts this gap without a run of several replicas. The
prediction needs s, the share by which AllReduce's loss falls when its batch
doubles. `gain` finds s, and `law` has the constants of the prediction.
"""
