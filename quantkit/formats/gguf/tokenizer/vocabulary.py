"""Convert tokenizers to GGUF: byte-level BPE (``gpt2``), other BPE (``llama``, ``gemma4``), unigram (``t5``).

The source is transformers' fast tokenizer. llama.cpp tokenizes with its own code: for byte-level BPE, a pre-tokenizer
is identified by its behavior (pretokenizers.py); for the others, llama.cpp's algorithm is run on a probe text.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Not supported: WordPiece, unigram with byte fallback,
tokenizers that add anything but BOS and EOS.
Reimplemented here, without special tokens: llama.cpp's SentencePiece-like BPE, Gemma 4's BPE, and unigram
(src/llama-vocab.cpp). All take quadratic time, which is fine for a probe of a few hundred characters.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise, product, zip_longest
from typing import Any

from quantkit.checkpoints.side_files import GENERATION
from quantkit.errors import SourceError, UnsupportedError
from quantkit.formats.gguf.tokenizer.pretokenizers import NAMES, PROBE, fingerprint, steps_name
from quantkit.models.config import ADD_ROWS
from quantkit.models.source import Source
from quantkit.system.untrusted import read_object, reraise_as, shown

SPACE = "\u2581"
UNKNOWN_PENALTY = 10.0  # below the worst score
LACKING = "the step {}, which llama.cpp lacks"


def spm_scores(model: dict[str, Any]) -> dict[str, float]:
    """Return llama.cpp's score of each token: minus the rank of its first merge, or the lowest if it has none."""
    first: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        first.setdefault(left + right, -float(rank))
    last = -float(len(model["merges"]))
    return {text: first.get(text, last) for text in model["vocab"]}


def spm_tokens(text: str, ids: dict[str, int], scores: dict[str, float], prefix: bool) -> list[int]:
    """Tokenize `text` as llama.cpp's ``llama`` model; characters without a token become UTF-8 byte tokens."""
    symbols = list(((" " if prefix else "") + text).replace(" ", SPACE))
    while found := [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]:
        at = -max(found)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    tokens: list[int] = []
    for symbol in symbols:
        tokens += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return tokens


def merge_pairs(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the BPE merges of a tokenizer.json's ``model`` section, highest priority first."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def gemma4_tokens(text: str, ids: Mapping[str, int], merges: list[tuple[str, str]]) -> list[int]:
    """Tokenize `text` as llama.cpp's ``gemma4`` model: BPE within lines; a run of newlines may be one token."""
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    tokens: list[int] = []
    for word in re.findall(r"[^\n]+|\n+", text.replace(" ", SPACE)):
        symbols = [word] if word[0] == "\n" and word in ids else list(word)
        while found := [(ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks]:
            at = min(found)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            pieces = [symbol] if symbol in ids else [f"<0x{byte:02X}>" for byte in symbol.encode()]
            tokens += [ids[piece] for piece in pieces if piece in ids]
    return tokens


@dataclass(frozen=True)
class Unigram:
    """A unigram tokenizer (llama.cpp's ``t5``), which picks the segmentation with the highest total score."""

    pieces: dict[str, tuple[int, float]]  # token ids and scores by text, with U+2581 for blanks
    unknown: int  # the id of a code point without a token
    charsmap: bytes | None  # the source's precompiled normalizer
    prefix: bool
    merges_blanks: bool

    def tokens(self, text: str) -> list[int]:
        text = self._normalized(text)
        lowest = min(score for _, score in self.pieces.values()) - UNKNOWN_PENALTY
        best: list[tuple[float, list[int]]] = [(0.0, [])]
        for end in range(1, len(text) + 1):
            endings = []
            for start in range(end):
                before, ids = best[start]
                number, score = self.pieces.get(text[start:end], (self.unknown, lowest))
                if end - start == 1 or number != self.unknown:
                    endings.append((before + score, [*ids, number]))
            best.append(max(endings, key=lambda item: item[0]))
        tokens: list[int] = []
        for number, run in groupby(best[-1][1]):
            tokens += [number] if number == self.unknown else run  # neighbouring unknown code points become one token
        return tokens

    def _normalized(self, text: str) -> str:
        if self.charsmap is not None:
            from tokenizers.normalizers import Precompiled

            text = Precompiled(self.charsmap).normalize_str(text)
        if self.merges_blanks:
            text = " ".join(word for word in text.split(" ") if word)
            return (" " + text).replace(" ", SPACE)
        return (" " * self.prefix + text).replace(" ", SPACE)


def read_unigram(model: dict[str, Any], steps: list[dict[str, Any]]) -> Unigram:
    """Read a unigram ``model`` section and steps of tokenizer.json; raise ValueError for steps that llama.cpp lacks."""
    if model.get("byte_fallback"):
        raise ValueError(LACKING.format("unigram with byte fallback"))
    if model.get("unk_id") is None:
        raise ValueError(LACKING.format("unigram without an unknown token"))
    charsmap, prefix, merges = None, False, False
    for step in steps:
        kind = step["type"]
        if kind == "Precompiled" and charsmap is None:
            charsmap = base64.b64decode(step["precompiled_charsmap"])
        elif kind == "Metaspace" and step.get("replacement") == SPACE:
            prefix = step.get("prepend_scheme", "always") != "never"
        elif _merges_blanks(step):
            merges = True
        elif kind != "WhitespaceSplit":
            raise ValueError(LACKING.format(kind))
    pieces = {text: (number, float(score)) for number, (text, score) in enumerate(model["vocab"])}
    return Unigram(pieces, int(model["unk_id"]), charsmap, prefix, merges)


def _merges_blanks(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("strip_right"))
    return step["type"] == "Replace" and step.get("pattern") == {"Regex": " {2,}"} and step["content"] in (" ", SPACE)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
OUTER_SPACES = "llama.cpp tokenizes a text that begins or ends with a space differently from the source's tokenizer"
NOT_NORMALIZED = "llama.cpp does not normalize text to NFC, as the source's tokenizer does"
KEYS = "tokenizer."  # prefix of the keys
GEMMA4 = ("gemma4_text", "gemma4_unified_text")  # llama.cpp puts BOS before every text with its tokenizer
# Special tokens that llama.cpp's converter makes visible, so that programs find tool calls in the text.
VISIBLE = (
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'
)  # fmt: skip
SUPPRESSED = "tokenizer.ggml.suppress_tokens"
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")


@dataclass(frozen=True)
class Algorithm:
    """llama.cpp's tokenizer `model` and pre-tokenizer, with the data that they need."""

    model: str
    pre: str = "default"
    scores: dict[str, float] | None = None
    merges: list[str] | None = None
    space_prefix: bool | None = None
    unigram: Unigram | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as GGUF stores it; `types` are llama.cpp token types, `suppressed` ids are never generated."""

    algorithm: Algorithm
    tokens: list[str]
    types: list[int]
    special_ids: dict[str, int]
    add_bos: bool
    add_eos: bool
    chat_template: str | list[dict[str, str]] | None
    suppressed: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Return the approximate size in the file, in bytes."""
        texts = [*self.tokens, *(self.algorithm.merges or []), str(self.chat_template or "")]
        return sum(len(text.encode()) + 8 for text in texts) + 8 * len(self.tokens)

    def write(self, writer: Any) -> None:
        """Add the tokenizer's keys to a gguf.GGUFWriter."""
        how = self.algorithm
        writer.add_tokenizer_model(how.model)
        writer.add_tokenizer_pre(how.pre)
        if how.space_prefix is not None:
            writer.add_add_space_prefix(how.space_prefix)
        if how.unigram is not None:
            writer.add_remove_extra_whitespaces(how.unigram.merges_blanks)
            if how.unigram.charsmap is not None:
                writer.add_precompiled_charsmap(how.unigram.charsmap)
        writer.add_token_list(self.tokens)
        if how.scores is not None:
            writer.add_token_scores([how.scores.get(token, 0.0) for token in self.tokens])
        writer.add_token_types(self.types)
        if how.merges is not None:
            writer.add_token_merges(how.merges)
        for name, number in self.special_ids.items():
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.suppressed:
            writer.add_array(SUPPRESSED, self.suppressed)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)
            if names := writer.kv_data[0].get("tokenizer.chat_templates"):
                names.value.sort()  # gguf stores a set in an order that differs between processes

    @property
    def keys(self) -> dict[str, Any]:
        import gguf

        writer = gguf.GGUFWriter(None, "")
        self.write(writer)
        return {key: value.value for key, value in writer.kv_data[0].items() if key.startswith(KEYS)}


def read_vocabulary(source: Source, size: int) -> Vocabulary:
    """Convert the source's tokenizer, for an embedding of `size` rows; raise UnsupportedError or SourceError."""
    tokenizer = source.tokenizer()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError(f"{source.model} has no tokenizer.json, which a GGUF file needs")
    with reraise_as(f"{source.model} has a tokenizer that a GGUF file cannot store", UnsupportedError):
        _refuse_ids(source, tokenizer, size)
        data = json.loads(backend.to_str())
        algorithm = _algorithm(source.architecture, tokenizer, data)
        tokens, types = _tokens(data, size, VISIBLE if algorithm.model == "gemma4" else ())
        _refuse_equal_tokens(tokens)
        special_ids = {}
        for name, key in ((name, f"{name}_token_id") for name in SPECIAL):
            own = getattr(tokenizer, key, None)
            number = source.config.get(key) if own is None else own
            if type(number) is int and 0 <= number < size:
                special_ids[name] = number
        ends, suppressed = _added_ends(tokenizer), _suppressed(source, size)
        made = Vocabulary(algorithm, tokens, types, special_ids, *ends, _template(tokenizer), suppressed)
        _ = made.nbytes  # raises if a text is not UTF-8
    return made


def _suppressed(source: Source, size: int) -> list[int]:
    """Return the valid token ids that generation_config.json suppresses."""
    path = source.side_files().get(GENERATION)
    given = read_object(path, SourceError, "Fetch it again, or remove it.").get("suppress_tokens") if path else None
    if given is None:
        return []
    if not isinstance(given, list) or any(type(number) is not int for number in given):
        raise UnsupportedError(
            f"{source.model}: generation_config.json has suppress_tokens = {shown(given)}, not a list of ids. Fix it."
        )
    return [number for number in given if 0 <= number < size]


def _template(tokenizer: Any) -> str | list[dict[str, str]] | None:
    template = getattr(tokenizer, "chat_template", None)
    texts = template if isinstance(template, dict) else {"default": template or ""}
    if wrong := [name for name, text in texts.items() if not isinstance(text, str)]:
        raise ValueError(f"the chat template {wrong[0]} is {shown(texts[wrong[0]])}, not a text")
    if isinstance(template, dict):
        if len({re.sub("[^0-9A-Za-z]", "_", name) for name in template}) < len(template):  # as gguf spells names
            raise ValueError(
                f"two of the chat templates {shown(sorted(template))} would have one name in a GGUF file, where all "
                "but letters and digits becomes '_'. Rename one"
            )
        return [{"name": name, "template": text} for name, text in sorted(template.items())]
    return texts["default"] or None


def _refuse_ids(source: Source, tokenizer: Any, size: int) -> None:
    """Raise UnsupportedError for a token id without an embedding row, ValueError for two tokens with one id."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    count = max(vocabulary.values(), default=0) + 1
    if count > size:
        raise UnsupportedError(
            f"{source.model} has a tokenizer of {count} tokens and an embedding of {size} rows; llama.cpp needs a row "
            f"for every token: {ADD_ROWS}"
        )
    texts: dict[int, str] = {}
    for text, number in vocabulary.items():
        if texts.setdefault(number, text) != text:
            raise ValueError(f"its tokens {shown(texts[number])} and {shown(text)} both have the id {number}")


def _refuse_equal_tokens(tokens: list[str]) -> None:
    """Raise ValueError if two ids have the same text, since llama.cpp aborts on such a file."""
    places: dict[str, int] = {}
    for number, text in enumerate(tokens):
        plain = text.partition("\0")[0]  # as llama.cpp reads it
        if plain and places.setdefault(plain, number) != number:
            raise ValueError(f"its ids {places[plain]} and {number} both have the text {shown(plain)}")


def _algorithm(architecture: str, tokenizer: Any, data: dict[str, Any]) -> Algorithm:
    model, decoder = data["model"], json.dumps(data.get("decoder"))
    steps = [*_steps(data.get("normalizer")), *_steps(data.get("pre_tokenizer"))]
    if model["type"] == "BPE" and model.get("byte_fallback"):
        ids, prefix = model["vocab"], _space_prefix(steps)
        if architecture in GEMMA4 and not prefix and _added_ends(tokenizer)[0]:
            merges = merge_pairs(model)
            notes = _compare(tokenizer, lambda text: gemma4_tokens(text, ids, merges))
            pairs = [" ".join(pair) for pair in merges]
            return Algorithm("gemma4", "gemma4", merges=pairs, space_prefix=False, notes=notes)
        scores = spm_scores(model)
        notes = _compare(tokenizer, lambda text: spm_tokens(text, ids, scores, prefix))
        return Algorithm("llama", scores=scores, space_prefix=prefix, notes=notes)
    if model["type"] == "BPE" and "ByteLevel" in decoder:
        name, notes = _pre_tokenizer(tokenizer, data)
        # A space inside a part is written in the byte-level alphabet.
        pairs = [m if isinstance(m, str) else " ".join(p.replace(" ", "\u0120") for p in m) for m in model["merges"]]
        return Algorithm("gpt2", name, merges=pairs, notes=notes)
    if model["type"] == "Unigram":
        unigram = read_unigram(model, steps)
        scores = {text: score for text, (_, score) in unigram.pieces.items()}
        notes = _compare(tokenizer, unigram.tokens)
        return Algorithm("t5", scores=scores, space_prefix=unigram.prefix, unigram=unigram, notes=notes)
    raise ValueError(f"the kind {model['type']}. Known: byte-level BPE, BPE with byte fallback, and unigram")


def _pre_tokenizer(tokenizer: Any, data: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return llama.cpp's pre-tokenizer name and notes on differences; raise ValueError if there is none."""
    if (key := fingerprint(tokenizer.encode(PROBE))) in NAMES:
        return NAMES[key], ()
    normalized = [step["type"] for step in _steps(data.get("normalizer"))]
    by_steps = steps_name(_steps(data.get("pre_tokenizer")), bool(data["model"].get("ignore_merges")))
    if by_steps is None or normalized not in ([], ["NFC"]):
        raise ValueError(
            f"no known llama.cpp pre-tokenizer has it (fingerprint {key}) and would split text wrongly. Compare it to "
            "the tokenizer of a related model, or use another method"
        )
    return by_steps, (NOT_NORMALIZED,) if normalized else ()


def _tokens(data: dict[str, Any], size: int, visible: Collection[str]) -> tuple[list[str], list[int]]:
    """Return text and type of tokens 0 .. size - 1; tokens in `visible` are printed although they are special."""
    vocabulary, unknown = data["model"]["vocab"], data["model"].get("unk_token")
    if data["model"]["type"] == "Unigram":
        unknown = vocabulary[data["model"]["unk_id"]][0]
        vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
    byte_fallback = bool(data["model"].get("byte_fallback"))
    added = {int(token["id"]): token for token in data.get("added_tokens", [])}
    texts: dict[int, str] = {number: text for text, number in vocabulary.items()}
    texts.update({number: token["content"] for number, token in added.items()})
    tokens, types = [], []
    for number in range(size):
        text = texts.get(number)
        if text is None:
            kind, text = UNUSED, f"[PAD{number}]"
        elif text == unknown and (byte_fallback or data["model"]["type"] == "Unigram"):
            kind = UNKNOWN
        elif number in added:
            # llama.cpp does the same: some checkpoints do not mark such tokens as special.
            control = added[number]["special"] or (text.startswith("<|") and text.endswith("|>"))
            kind = CONTROL if control and text not in visible else USER_DEFINED
            text = text.replace(SPACE, " ") if kind == USER_DEFINED else text
        else:
            kind = BYTE if byte_fallback and re.fullmatch("<0x..>", text) else NORMAL
        tokens.append(text)
        types.append(kind)
    return tokens, types


def _added_ends(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether the tokenizer adds BOS before a text, and EOS after it."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a")
    bos, eos = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    for add_bos, add_eos in product((False, True), repeat=2):
        if full == bos * add_bos + plain + eos * add_eos:
            return add_bos, add_eos
    raise ValueError(
        f"it turns 'a' into {full}, and only BOS {bos[0]} before a text and EOS {eos[0]} after it are known"
    )


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer section, with nested sequences flattened."""
    if not part:
        return []
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inner is None else [step for sub in inner for step in _steps(sub)]


def _space_prefix(steps: list[dict[str, Any]]) -> bool:
    """Return whether the steps prepend a space to the text; raise ValueError for steps that llama.cpp lacks."""
    prefix = False
    for step in steps:
        if step["type"] == "Prepend" and step["prepend"] == SPACE:
            prefix = True
        elif step["type"] == "Metaspace" and step.get("replacement") == SPACE:
            prefix = prefix or step.get("prepend_scheme", "always") != "never"
        elif step["type"] == "Split" and step.get("pattern") == {"String": " "}:
            continue  # the spaces are already replaced
        elif step["type"] != "Replace" or step.get("content") != SPACE:
            raise ValueError(LACKING.format(step["type"]))
    return prefix


def _compare(tokenizer: Any, follow: Callable[[str], list[int]]) -> tuple[str, ...]:
    """Compare llama.cpp's algorithm `follow` with the tokenizer on a probe text; return notes or raise ValueError."""
    ours, theirs = follow(PROBE), tokenizer.encode(PROBE, add_special_tokens=False)
    if ours != theirs:
        at = next(i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b)
        raise ValueError(f"llama.cpp gives other tokens, from token {at} of a probe text on")
    spaced = " a  b "
    return () if follow(spaced) == tokenizer.encode(spaced, add_special_tokens=False) else (OUTER_SPACES,)
