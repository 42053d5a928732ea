"""Options of methods that can refine their result by training."""

from __future__ import annotations

from pydantic import Field

from quantkit.records.recipe import Strict


class Learned(Strict):
    """Options of learned rounding and scale tuning."""

    refine: bool = Field(
        False, description="also learn each block's rounding and tune all scales end to end; better but much slower"
    )
    refine_steps: int | None = Field(
        None, ge=0, le=10_000, description="training steps per block; default: 24, at 2 and 3 bits 64"
    )
    tune_steps: int = Field(20, ge=0, le=10_000, description="training steps of the scales, end to end")

    @property
    def learned(self) -> bool:
        return self.refine and self.refine_steps != 0

    @property
    def tuned(self) -> bool:
        return self.refine and self.tune_steps > 0
