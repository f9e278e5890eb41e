"""A study of the gap: how much higher the loss is than AllReduce's.

Many small runs measure the gap of several replicas (`experiments.train_gaps`).
"""
