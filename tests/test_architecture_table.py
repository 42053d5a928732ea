"""This file prints the table of docs/methods/gguf-architectures.md; the page agrees with the code and the tests."""

from functools import cache
from pathlib import Path

import pytest
from tiny_architectures import ARCHITECTURES, tiny_of
from tiny_more import MORE
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quantkit.errors import UnsupportedError
from quantkit.formats.bitsandbytes import replaced_layers
from quantkit.formats.ctranslate2 import architectures as support
from quantkit.formats.ctranslate2.architectures import FAMILIES
from quantkit.formats.gguf.architectures.known import KNOWN, LACKING
from quantkit.models.architectures import DENSE, MIXTURES, PROVEN
from quantkit.models.skeleton import open_skeleton

pytest.importorskip("bitsandbytes", reason="a column of the table asks bitsandbytes")

PAGE = Path(__file__).parents[1] / "docs" / "methods" / "gguf-architectures.md"
ALL = (*ARCHITECTURES.values(), *map(tiny_of, MORE))
COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
SHORT_TEXTS = ("gemma3_text", *support.GEMMA4)  # sliding windows of published models are shorter than their contexts
SHORT = {support.NO_LOADER: "no loader", support.RENAMED: "renamed settings", support.UNPROVEN: "unproven"}


@cache
def nf4_cells():
    found = {}
    for tiny in ALL:
        settings = CONFIG_MAPPING[tiny.kind](**tiny.settings)
        config = {**settings.to_dict(), "architectures": ["CausalLM"]}
        try:
            replaced = replaced_layers(config, open_skeleton(config).linears())
        except UnsupportedError:
            found[tiny.kind] = "no: own layers"
            continue
        assert all(".experts." in name for name in replaced.dense), (tiny.kind, replaced.dense[:5])
        found[tiny.kind] = "not the experts" if replaced.dense else "yes"
    return found


def cells(kind):
    """yes, or no and why, of gptq, rtn and awq; nf4; gguf; ctranslate2."""
    nf4 = nf4_cells()[kind]
    gguf = "yes" if kind in KNOWN else f"no: {LACKING[kind]}"
    reason = support.reason_of(kind)
    ctranslate2 = "yes" if kind in FAMILIES else f"no: {SHORT.get(reason, 'soft caps')}"
    if kind in SHORT_TEXTS:
        ctranslate2 = "short texts"
    return kind, "yes" if kind in PROVEN else "untested", nf4, gguf, ctranslate2


def table():
    head = ("architecture", "`gptq`, `rtn`, `awq`", "`nf4`", "`gguf`", "`ctranslate2`")
    rows = [head, ("---",) * len(head), *(cells(kind) for kind in sorted(PROVEN))]
    return "\n".join(f"| {' | '.join(row)} |".replace("| --- ", "|---").replace("--- |", "---|") for row in rows)


def test_the_page_has_the_table_of_the_code_and_a_reason_for_each_of_the_others():
    assert f"\n{table()}\n" in PAGE.read_text(encoding="utf-8")
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert causal >= PROVEN
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{len(PROVEN)} of the {len(causal)} model types" in page
    halves, wholes, remain = others()
    assert f"Of the other {len(causal - PROVEN)} model types, {len(halves)} are encoders" in page
    assert f"{len(wholes)} are multimodal models whose text model is in the table, and {len(remain)} remain" in page
    section = PAGE.read_text(encoding="utf-8").partition("\n## Not tested\n")[2].partition("\n\nEncoders")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    named = [name for row in rows for name in row[1].split(", ")]
    assert len(named) == len(set(named))
    assert set(named) == others()[2]


@cache
def others():
    """Of the model types that are not proven: encoders and halves of encoder-decoders; wholes with a proven text half;
    the others. Drafts are none of the wholes."""
    halves, wholes, remain = set(), set(), set()
    for kind in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - PROVEN:
        if kind.endswith("_assistant"):
            remain.add(kind)
            continue
        config = CONFIG_MAPPING[kind]()
        if getattr(config, "is_decoder", True) is False or getattr(config, "is_encoder_decoder", False):
            halves.add(kind)
        elif config.get_text_config(decoder=True).model_type in PROVEN:
            wholes.add(kind)
        else:
            remain.add(kind)
    return halves, wholes, remain


def test_proven_is_what_the_tiny_models_are_of_and_gguf_says_yes_or_why_not():
    mixtures = {tiny.kind for tiny in ALL if tiny.settings.keys() & COUNTS}
    assert set(MIXTURES) == mixtures
    assert set(DENSE) == {tiny.kind for tiny in ALL} - mixtures
    assert not set(LACKING) & KNOWN.keys()
    assert set(LACKING) | KNOWN.keys() == PROVEN


if __name__ == "__main__":
    print(table())
