"""Engine MLX, by mlx-lm, on Apple silicon or on a CPU: https://github.com/ml-explore/mlx-lm

Not supported: batches (windows are computed one by one), and a chosen number of threads (MLX chooses it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.contracts.engine import Engine, LoadedModel, LoadSpec, refuse_dtype
from quantkit.contracts.model import Model
from quantkit.errors import EngineError, RecipeError, missing_package, pip_line
from quantkit.formats.mlx import ARCHITECTURES
from quantkit.models.config import older_keys
from quantkit.system.device import AUTO, CPU
from quantkit.system.untrusted import reraise_as, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quantkit.contracts.engine import Window

DTYPES = ("float16", "bfloat16", "float32")
GPU = "gpu"
ROWS = 32  # positions whose logits become float32 at a time


class MlxModel:
    """A model loaded by mlx-lm; see `LoadedModel`."""

    def __init__(self, model: Any, dtype: str, notes: tuple[str, ...]) -> None:
        self._model, self.dtype, self.notes = model, dtype, notes

    def pieces(self, windows: Sequence[Window]) -> Iterator[NDArray[np.float32]]:
        """Yield the logits (n, V) of the scored positions in order, at most `ROWS` positions at a time."""
        import mlx.core as mx

        for window in windows:
            logits = self._logits(window.ids.tolist())[0][window.scored]
            for start in range(0, len(logits), ROWS):
                yield np.array(logits[start : start + ROWS].astype(mx.float32))

    def _logits(self, ids: list[int], cache: Any = None) -> Any:
        import mlx.core as mx

        with reraise_as(f"MLX failed on {len(ids)} tokens", EngineError):
            logits = self._model(mx.array([ids]), cache=cache)
            mx.eval(logits)
        return logits

    def stream(self, ids: list[int], count: int) -> Iterator[int]:
        """Yield `count` greedy tokens after the prompt `ids`, each as soon as it is generated."""
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self._model)
        for _ in range(count):
            token = int(self._logits(ids, cache)[0, -1].argmax())
            ids = [token]
            yield token


def _find_device(asked: str) -> str:
    import mlx.core as mx

    own = GPU if mx.default_device().type == mx.DeviceType.gpu else CPU
    if asked in (AUTO, own):
        return own
    raise RecipeError(f"it computes on {own} here")


def _load(model: Model, spec: LoadSpec) -> LoadedModel:
    try:
        import mlx.core as mx
        from mlx.utils import tree_map
        from mlx_lm.utils import load_model
    except ImportError as error:
        raise missing_package("mlx-lm", "mlx", error) from None
    with reraise_as(f"mlx-lm cannot open {model.folder}", EngineError):
        loaded, _ = load_model(model.folder, model_config=older_keys(model.config))
    dtype = spec.dtype or "float16"
    cast = getattr(mx, dtype)
    loaded.update(tree_map(lambda v: v.astype(cast) if mx.issubdtype(v.dtype, mx.floating) else v, loaded.parameters()))
    kind = model.config.get("model_type")
    unseen = () if kind in ARCHITECTURES else (f"mlx-lm was not compared with transformers on {shown(kind)}",)
    return MlxModel(loaded, dtype, unseen)


ENGINE = Engine(
    name="mlx",
    module="mlx_lm",
    install=f"Install it with: {pip_line('mlx')}",
    opens="mlx-lm loads the formats mlx and float; --method keep --format mlx converts grouped codes",
    load=_load,
    holds=lambda stats, _dtype: stats.weight_bytes,
    find_device=_find_device,
    refuse=lambda dtype: refuse_dtype("mlx", dtype, DTYPES),
    variables=("MLX_",),
    server="mlx-lm's server",
)
