"""Recipes on vime: hooks for its public customisation points, the launcher, and the metric hook.

Data's way: :mod:`recipes.vime.init` checks vime and rebinds its log-probability function, :mod:`recipes.vime.head`
makes the output layer hand over hidden states, :mod:`recipes.vime.logp` turns them into log-probabilities with
``rl_kernel.linear_logp``, and :mod:`recipes.vime.mismatch` counts the bits that differ from rollout.
"""

from recipes.vime.launch import launch

__all__ = ["launch"]
