"""What the process that others are forked from has imported: all that a conversion needs. No threads compute here."""

import gc
import os
import pkgutil
import tempfile
from contextlib import redirect_stderr, suppress
from importlib import import_module
from pathlib import Path

import torch
from killed import main as main
from tiny_models import save_tiny

import quantkit

OFTEN_USED = (
    *("bitsandbytes", "ctranslate2.converters", "gguf"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
)

torch.set_num_threads(1)
modules = [module.name for module in pkgutil.walk_packages(quantkit.__path__, "quantkit.")]
for name in (*(name for name in modules if not name.endswith(("__main__", "_search"))), *OFTEN_USED):
    with suppress(ImportError):  # an optional package
        import_module(name)
with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
    save_tiny(Path(folder))  # transformers keeps tables that it makes for its first model
gc.freeze()  # or each child would copy the memory of all that it looks at for garbage
