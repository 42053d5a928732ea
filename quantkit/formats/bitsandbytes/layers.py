"""Which layers transformers gives to bitsandbytes when it loads a checkpoint, and which of those a processor computes.

Its own code is asked, on modules without weights: it replaces plain linear layers and GPT-2's Conv1D, and leaves alone
subclasses such as FalconLinear, stacks of experts, the head, and what it keeps in float32.
Source: transformers/integrations/bitsandbytes.py; `_convert_weight_packed_for_cpu` of bitsandbytes/functional.py, 0.50.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from quantkit.contracts.format import Layout
from quantkit.errors import UnsupportedError
from quantkit.models.skeleton import open_skeleton
from quantkit.models.source import Source
from quantkit.models.unfuse import renamed
from quantkit.untrusted import shown, silenced

# Where a processor has AVX-512 with bfloat16, codes are laid out anew before the first product, or an assertion fails.
ROW_UNIT = 32
RUN = 64  # columns that share a scale; with a part of one in a row, values are wrong, or a shape error comes
FOR_CARDS = (
    f"bitsandbytes computes it on cards only: processors want columns in multiples of {RUN}, and those that have "
    f"AVX-512 with bfloat16 rows in multiples of {ROW_UNIT}"
)


@dataclass(frozen=True)
class Replaced:
    """The weights that transformers lets bitsandbytes hold, by the skeleton's names, and those that stay `dense`.

    `kept_in` says in what the first of those is kept. `skipped` are modules that it would replace and that are not
    quantized, beside those it leaves out by itself, which count only where a file names none: empty, or all of them.
    """

    quantized: tuple[str, ...]
    dense: tuple[str, ...]
    kept_in: str
    skipped: tuple[str, ...]


def replaced_layers(config: dict[str, Any], linears: Collection[str], settings: Any = None) -> Replaced:
    """What becomes of `linears`, the weights of our skeleton of a config.json; raises UnsupportedError for none at all.

    `settings` is the configuration of transformers for `config`, where it was made before.
    """
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    model = open_skeleton(config, native=True, settings=settings).model
    kind = str(config.get("model_type"))
    classes = {renamed(kind, f"{name}.weight"): type(module).__name__ for name, module in model.named_modules()}
    quantizer = Bnb4BitHfQuantizer(BitsAndBytesConfig(load_in_4bit=True), pre_quantized=True)
    usual = quantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    with silenced():
        quantizer.preprocess_model(model, device_map=None)
    names = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    found = {renamed(kind, name): name for name in names}
    quantized = tuple(name for name in linears if name in found)
    dense = tuple(name for name in linears if name not in found)
    kept_in = f"in a {classes[dense[0]]}" if dense and dense[0] in classes else "stacked"
    if not quantized:
        raise UnsupportedError(
            f"transformers gives bitsandbytes no layer of {shown(config.get('model_type'))} (not {dense[0]}, which it "
            f"keeps {kept_in}), so nothing would be quantized"
        )
    others = sorted(found[name].removesuffix(".weight") for name in found.keys() - set(linears))
    return Replaced(quantized, dense, kept_in, (*sorted(usual), *others) if others else ())


def bits_per_weight(source: Source, quantized: int, layout: Layout) -> float:
    """Of all weights of the source, where so many are quantized; scales count, names and tables do not."""
    scales = 8 / RUN + 32 / (RUN * 256) if (layout.settings or {}).get("double_quant", True) else 32 / RUN
    rest = (source.parameters - quantized) * (32 if layout.dtype == "float32" else 16)
    return (quantized * (4 + scales) + rest) / source.parameters


def computed_by_processors(rows: int, columns: int, units: bool = True) -> bool:
    """Whether bitsandbytes computes a layer (rows, columns) on processors with (`units`) or without bfloat16 units."""
    return columns % RUN == 0 and (rows % ROW_UNIT == 0 or not units)


def has_bfloat16_units() -> bool:
    """Whether bitsandbytes takes this processor for one that has them."""
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())
