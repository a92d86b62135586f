"""Prompts and tokenizers."""

from recipes.data.prompts import Prompt, PromptDataset
from recipes.data.tokenizer import load_tokenizer

__all__ = ["Prompt", "PromptDataset", "load_tokenizer"]
