"""Estimate how much of a text occurs in another one, by hashes of passages of 13 words.

A passage is `WORDS` consecutive words, in lower case and without punctuation; in scripts without spaces, each character
is a word. GPT-3's authors also compared 13-grams (Brown et al. 2020, appendix C). The sketch of a text is the set of
its `SKETCH_SIZE` smallest hashes (bottom-k sketch, Broder 1997). With it, the share of another text's passages that
occur in the text can be estimated; the share is exact if the sketch holds all hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
WORDS = 13
SKETCH_SIZE = 1024
BYTES = 6  # of a hash in a sketch: 8 characters in base64, without padding
# Thai to Burmese, Khmer, kana, Chinese characters: none of them has spaces between words.
WORD = re.compile(
    r"[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
    r"|[^\W\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)
ODD = np.uint64(0x9E3779B97F4A7C15)


def hashes_of(text: str) -> Hashes:
    """Return a 48-bit hash of each passage of a text, in order, (passages,) uint64."""
    words = WORD.findall(text.lower())
    if len(words) < WORDS:
        return np.zeros(0, np.uint64)
    known: dict[str, int] = {}
    for word in words:
        if word not in known:
            known[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
    each = np.array([known[word] for word in words], np.uint64)
    count = len(words) - WORDS + 1
    sums = np.zeros(count, np.uint64)
    for at in range(WORDS):
        sums = sums * ODD + each[at : at + count]  # modulo 2^64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64 (Steele et al. 2014)
        sums = (sums ^ (sums >> np.uint64(shift))) * np.uint64(factor)
    return (sums ^ (sums >> np.uint64(31))) >> np.uint64(64 - 8 * BYTES)


def sketch_of(texts: Iterable[str]) -> str:
    """Return the sketch of `texts` in base64; passages do not cross from one text to the next."""
    sketch = np.zeros(0, np.uint64)
    for text in texts:
        sketch = np.unique(np.concatenate([sketch, np.unique(hashes_of(text))[:SKETCH_SIZE]]))[:SKETCH_SIZE]
    packed = sketch.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :BYTES]
    return base64.b64encode(packed.tobytes()).decode()


@dataclass(frozen=True)
class Seen:
    """Number of passages `sampled` from a text, and how many of them were `seen` in another text."""

    seen: int
    sampled: int

    @property
    def share(self) -> float:
        """Return the estimated share of passages that were seen, 0 to 1."""
        return self.seen / self.sampled if self.sampled else 0.0


def seen_in(sketch: str, texts: Iterable[str], among: Iterable[str] | None = None) -> Seen:
    """Count the distinct passages of `texts` that occur in the text with this `sketch`.

    With `among`, count only passages that also occur in one of these texts.
    """
    packed = np.frombuffer(base64.b64decode(sketch), np.uint8).reshape(-1, BYTES)
    before = np.zeros((len(packed), 8), np.uint8)
    before[:, :BYTES] = packed
    known = before.view("<u8").ravel().astype(np.uint64)
    # If the sketch omits hashes, only those up to its largest one can be compared.
    bound = known.max() if len(known) == SKETCH_SIZE else np.uint64((1 << 8 * BYTES) - 1)

    def distinct(texts: Iterable[str]) -> Hashes:
        found = [hashes_of(text) for text in texts]
        return np.unique(np.concatenate([np.zeros(0, np.uint64), *(hashes[hashes <= bound] for hashes in found)]))

    sampled = distinct(texts) if among is None else np.intersect1d(distinct(texts), distinct(among))
    return Seen(int(np.isin(sampled, known).sum()), len(sampled))
