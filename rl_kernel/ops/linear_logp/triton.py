"""Portable linear_logp on GPUs: matrix products in tiles of the vocabulary, never a [T, V] tensor.

Forward: logits of a tile of columns (fp32, one ascending chain over H), their leaf statistics, next tile. Backward:
the same tile of logits again, their gradient rounded once to the hidden dtype, then its share of dH and its rows of dW.
Both directions keep one tile of logits and, backward, one block of dlogits.
"""
