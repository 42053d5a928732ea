"""The configuration of transformers for a config.json, with its defaults for what the file leaves out."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import SourceError, UnsupportedError, reason_of

if TYPE_CHECKING:
    pass


def leave_torch_out() -> None:
    """Let transformers come without torch and without models, where neither is loaded yet.

    A process that only asks it for settings and tokenizers then starts sooner and holds 300 MB less. Our own modules
    can load torch afterwards.
    """
    if sys.modules.keys() & {"torch", "transformers"}:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # what Python takes for "cannot be imported"
    try:
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]


def open_config(config: dict[str, Any]) -> Any:
    """The transformers configuration of a config.json's content; raises UnsupportedError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if "auto_map" in config:
        raise UnsupportedError(
            f"the model type {config.get('model_type')!r} brings its own code, which quantkit does not run. "
            "Use an architecture that transformers knows."
        )
    with tempfile.TemporaryDirectory() as folder:
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        (Path(folder) / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, StrictDataclassError) as error:
            raise UnsupportedError(
                f"transformers cannot read the config.json of the architecture {config.get('model_type')!r}: "
                f"{reason_of(error)}"
            ) from None


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that lies in `folder`; raises SourceError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{folder} holds no tokenizer that transformers can load: {reason_of(error)}") from None
