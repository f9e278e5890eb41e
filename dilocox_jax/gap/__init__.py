"""What M replicas cost: the expected gap to AllReduce, without training them.

`expected.expected_gap` gives the gap, `gain` the one number that it needs of a
text and a model, and `law` the constants of the law with their sources.
"""
