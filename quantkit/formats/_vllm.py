"""What vLLM refuses of checkpoints with grouped codes, by their shapes."""

from __future__ import annotations

from collections.abc import Mapping

UNIT = 32  # rows and columns of what each processor holds
PARALLEL_SIZES = (2, 4, 8)
GROUP_SIZES = (128, 64, 32)
# Layers whose columns engines share out among processors (tensor parallel); of all others they share out the rows.
SPLIT_COLUMNS = ("o_proj", "out_proj", "dense", "c_proj", "down_proj", "dense_4h_to_h", "fc2", "fc_out", "w2")


def tensor_parallel_notes(linears: Mapping[str, tuple[int, int]], group_size: int | str) -> tuple[str, ...]:
    """Note what vLLM would refuse of a valid artifact: odd shapes, or some tensor parallel sizes."""
    for name, (n, k) in linears.items():
        if n % UNIT or k % UNIT:
            return (f"vLLM would refuse this artifact: {name} is {n} x {k}, and it needs multiples of {UNIT}",)
    refused = {size: reason for size in PARALLEL_SIZES if (reason := _cannot_split(linears, group_size, size))}
    if not refused:
        return ()
    sizes = " or ".join(map(str, refused))
    return (f"vLLM would refuse this artifact with tensor parallel size {sizes}: {next(iter(refused.values()))}",)


def _cannot_split(linears: Mapping[str, tuple[int, int]], group_size: int | str, size: int) -> str | None:
    """Return why `size` processors cannot share the layers. Key and value heads are copied if they are too few."""
    group = group_size if isinstance(group_size, int) and group_size > 0 else UNIT
    by_columns = {name: k for name, (_, k) in linears.items() if name.split(".")[-2] in SPLIT_COLUMNS}
    for name, (n, k) in linears.items():
        if name in by_columns and k % (size * group):
            smaller = (g for g in GROUP_SIZES if g < group and all(k % (size * g) == 0 for k in by_columns.values()))
            hint = f"; group_size {fits} would" if (fits := next(smaller, None)) else ""
            return f"the {k} columns of {name} do not split into {size} parts of whole groups of {group}{hint}"
        if name not in by_columns and name.split(".")[-2] not in ("k_proj", "v_proj") and n % (size * UNIT):
            return f"the {n} rows of {name} do not split into {size} parts of a multiple of {UNIT}"
    return None
