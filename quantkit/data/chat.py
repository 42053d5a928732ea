"""Conversations from the bundled texts or a user's file, rendered with a model's chat template.

The template comes with the model and is untrusted: transformers renders it in jinja2's sandbox, and any exception
becomes a TextError. Templates get `DAY` as today's date, so that a text has the same tokens on every day. A message has
a role and a content: https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from quantkit.errors import TextError
from quantkit.system.untrusted import parse_json, reraise_as, shown

ROLES = ("system", "user", "assistant")
DAY = date(2024, 7, 26)  # the default in the templates of Llama 3.1 to 3.3
TODAY = re.compile(r"""strftime_now\(\s*(["'])([^"'\\]{1,40})\1\s*\)""")
SEPARATOR = re.compile(r"^---\n", re.MULTILINE)
SPEAKER = re.compile(r"^(User|Assistant):\n", re.MULTILINE)
FIX = (
    'Each line of a .jsonl file is a conversation, {"messages": [{"role": "user", "content": "..."}, ...]}, or a '
    'text, {"text": "..."}.'
)


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation, in order, each as (role, content)."""

    messages: tuple[tuple[str, str], ...]

    @property
    def plain(self) -> str:
        """Return the conversation in the plain form of the bundled files."""
        return "\n\n".join(f"{role.capitalize()}:\n{content}" for role, content in self.messages)


def parse_plain(content: str) -> tuple[Conversation, ...]:
    """Parse a bundled file: ``User:`` and ``Assistant:`` on separate lines, ``---`` between conversations."""
    found = []
    for block in SEPARATOR.split(content):
        _, *turns = SPEAKER.split(block)
        pairs = zip(turns[::2], turns[1::2], strict=True)
        found.append(Conversation(tuple((role.lower(), text.strip()) for role, text in pairs)))
    return tuple(found)


def parse_lines(content: str, file: Path) -> tuple[str | Conversation, ...]:
    """Parse a JSON lines file of texts and conversations; raises TextError with the number of an invalid line."""
    return tuple(
        _part(parse_json(line, f"line {number} of {file}", TextError, FIX), f"line {number} of {file}")
        for number, line in enumerate(content.split("\n"), 1)
        if line.strip()
    )


def _part(value: Any, where: str) -> str | Conversation:
    messages, text = (value.get(key) if isinstance(value, dict) else None for key in ("messages", "text"))
    if isinstance(messages, list) and messages:
        return Conversation(tuple(_message(message, where) for message in messages))
    if not isinstance(text, str):
        raise TextError(f"{where} has neither messages nor a text: {shown(value)}. {FIX}")
    return text if text.endswith("\n") else f"{text}\n\n"


def _message(message: Any, where: str) -> tuple[str, str]:
    role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
    if role not in ROLES or not isinstance(content, str):
        raise TextError(
            f"{where} has an invalid message: {shown(message)}. Its role must be one of {', '.join(ROLES)}, and "
            "its content a text."
        )
    return role, content


def render(tokenizer: Any, conversation: Conversation) -> str:
    """Return a conversation as text in the tokenizer's chat template, with special tokens; raises TextError."""
    if not getattr(tokenizer, "chat_template", None):
        raise TextError(
            "the model has no chat template, which this text's conversations need. Use a text without them, such as "
            "sample, articles or code, or the model's chat version."
        )
    with reraise_as("the model's chat template cannot render a conversation of the text", TextError):
        template = TODAY.sub(lambda call: json.dumps(DAY.strftime(call[2])), tokenizer.get_chat_template())
        messages = [{"role": role, "content": content} for role, content in conversation.messages]
        day = DAY.strftime("%d %b %Y")
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, date_string=day)
    return str(text)


def plain_texts(parts: tuple[str | Conversation, ...]) -> Iterator[str]:
    """Yield all texts, and all messages of conversations, without a template."""
    for part in parts:
        yield from [part] if isinstance(part, str) else (content for _, content in part.messages)
