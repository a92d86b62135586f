"""Tokenizers: any Hugging Face folder or name, or the small one that ships with the arithmetic set."""

from __future__ import annotations

import os
from typing import Any

from recipes.data.sources import ARITHMETIC, ARITHMETIC_DIR
from recipes.errors import DataError


def load_tokenizer(name: str | None = None) -> Any:
    """A Hugging Face fast tokenizer.

    Args:
        name: a folder with ``tokenizer.json``, a hub name, or ``arithmetic`` / None for the one in this package.

    Raises:
        DataError: it cannot be loaded.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name is None or name == ARITHMETIC:
        return PreTrainedTokenizerFast.from_pretrained(str(ARITHMETIC_DIR))
    where = f"tokenizer {name} (model.tokenizer, or model.path without one)"
    if name.startswith(("/", "./", "../", "~")) and not os.path.isdir(name):  # no hub name: the hub must not be asked
        raise DataError("no such folder", where=where, fix="Give a folder with tokenizer.json.")
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # noqa: BLE001 - the library raises many types; each becomes one readable message
        raise DataError(
            f"cannot load the tokenizer: {type(error).__name__}: {str(error).splitlines()[0][:200].rstrip('.')}",
            where=where,
            fix="Give a folder with tokenizer.json, or check the hub name and the network.",
        ) from error
