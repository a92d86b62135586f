"""Token embedding, whole or sharded over the vocabulary."""

from rl_kernel.ops.embedding.op import embedding

__all__ = ["embedding"]
