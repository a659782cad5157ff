"""Prompts as the command line takes them: token ids, text, or messages with a tokenizer.

The tokenizer alone needs transformers, which is loaded when one is asked for.
"""

import argparse
import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentmem.errors import InvalidInputError, NotFoundError

_MAX_TOKEN = 2**32 - 1
_STDIN = "-"


class Tokenizer(Protocol):
    """What of a transformers tokenizer is used."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Return the text of ids."""
        ...

    def apply_chat_template(
        self, messages: list[dict[str, object]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Return messages as one text."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was asked.

    Attributes:
        tokens: Its token ids.
        tokenizer: What turns them into text; None without one.
    """

    tokens: list[int]
    tokenizer: Tokenizer | None


def read_prompt(arguments: argparse.Namespace) -> Prompt:
    """Read the prompt that a command line names.

    Raises:
        InvalidInputError: It is no prompt, or needs a tokenizer.
        NotFoundError: There is no such file.
    """
    tokenizer = None if arguments.tokenizer is None else _load_tokenizer(arguments.tokenizer)
    if arguments.tokens is not None:
        return Prompt(_read_tokens(arguments.tokens), tokenizer)
    if tokenizer is None:
        raise InvalidInputError("--text and --messages need --tokenizer FOLDER; or give ids with --tokens")
    if arguments.text is not None:
        return Prompt(tokenizer.encode(_read(arguments.text), add_special_tokens=True), tokenizer)
    messages = _read_messages(arguments.messages)
    is_asking = bool(messages) and messages[-1].get("role") != "assistant"
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_asking)
    return Prompt(tokenizer.encode(text, add_special_tokens=False), tokenizer)


def _read(path: Path) -> str:
    if str(path) == _STDIN:
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {str(path)!r}") from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise InvalidInputError(f"{str(path)!r} is no text in UTF-8: {error}") from error


def _read_tokens(path: Path) -> list[int]:
    """Read ids as a JSON list, or with spaces between them."""
    text = _read(path)
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except ValueError as error:
        raise InvalidInputError(f"{str(path)!r} holds no token ids: {error}") from error
    for index, token in enumerate(found):
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN:
            raise InvalidInputError(f"{str(path)!r}: {token!r} at index {index} is no token id")
    return list(found)


def _read_messages(path: Path) -> list[dict[str, object]]:
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise InvalidInputError(f"{str(path)!r} is no JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise InvalidInputError(f"{str(path)!r} must be a JSON list of messages, each with a role and content")
    return found


def _load_tokenizer(folder: Path) -> Tokenizer:
    if not folder.is_dir():
        raise NotFoundError(f"there is no folder {str(folder)!r} to load a tokenizer from")
    try:
        tokenizer: Tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    except ModuleNotFoundError as error:
        raise InvalidInputError("--tokenizer needs transformers: pip install 'agentmem[transformers]'") from error
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{str(folder)!r} holds no tokenizer: {error}") from error
    return tokenizer
