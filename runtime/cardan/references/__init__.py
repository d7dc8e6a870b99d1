"""What results are held to: attention and sampling by their definitions, and a model whose logits are known.

It knows no platform and no test: the conformance suite and the comparisons of ``cardan.accuracy`` both build on it.
"""
