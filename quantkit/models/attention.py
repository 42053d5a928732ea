"""Keys and values of a transformers model, on their way into attention and the cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from quantkit.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# From an attention module with its keys, behind the rotary embedding, and values to the ones that it uses.
Change: TypeAlias = Callable[[nn.Module, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_NUMBERS = count()


def refuse_own_attention(model: PreTrainedModel) -> None:
    """Raise UnsupportedError if the model does not pass the keys and values of its cache to transformers' functions."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(f"{config.model_type} caches latent vectors (MLA), which quantkit does not round to FP8")
    if model.config._attn_implementation not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise UnsupportedError(f"the attention of {config.model_type} is its own, so its cache cannot be rounded")


def change_keys_and_values(model: PreTrainedModel, change: Change) -> Callable[[], None]:
    """Let `change` replace keys and values in each call of an attention; return a function that undoes this."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    refuse_own_attention(model)
    plain, changed = model.config._attn_implementation, f"quantkit_{next(_NUMBERS)}"
    attend = ALL_ATTENTION_FUNCTIONS[plain]

    def call(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **how: Any
    ) -> Any:
        return attend(module, query, *change(module, key, value), *rest, **how)

    ALL_ATTENTION_FUNCTIONS.register(changed, call)
    ALL_MASK_ATTENTION_FUNCTIONS.register(changed, ALL_MASK_ATTENTION_FUNCTIONS[plain])
    model.set_attn_implementation(changed)
    return lambda: model.set_attn_implementation(plain)
