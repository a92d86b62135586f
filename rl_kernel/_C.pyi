# ruff: noqa: N999
"""Importing the compiled extension registers its operators under ``torch.ops.rlk``; it has no names of its own."""
