"""A study of the gap: how far the loss of replicas ends above AllReduce's.

Many small runs measure the gap (`experiments.train_gaps`).
"""
