"""A transformers tokenizer's chat template: messages to text, text to ids, and back, at the borders of messages.

Knows nothing of branches.
"""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentmem.adapter import Encoded
from agentmem.errors import InvalidInputError

_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a template raises of its own, or by reading what a message does not have."""


class TokenizerTemplate:
    """The chat template of one tokenizer.

    Attributes:
        special: Ids that are no text: begin and end of a turn, of the sequence ...
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Stand for the template of `tokenizer`.

        Raises:
            InvalidInputError: There is no tokenizer, or it has no template.
        """
        if tokenizer is None:
            raise InvalidInputError("messages need a tokenizer: pass tokenizer= to agentmem.open, or append ids")
        if not tokenizer.chat_template:
            raise InvalidInputError(
                "messages need a chat template, and the tokenizer has none: set tokenizer.chat_template before "
                "agentmem.open, or append text in the form that the model was trained on"
            )
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = frozenset({*tokenizer.all_special_ids, *(token for token in added if added[token].special)})
        self._spellings = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(self.special)}

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        is_prompt: bool,
        options: Mapping[str, object],
    ) -> str:
        """Return the text of the messages (see `agentmem.adapter.ChatTemplate.render`)."""
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],  # type: ignore[arg-type]  # values may be lists, too
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=is_prompt,
                tokenize=False,
                **options,  # type: ignore[arg-type]  # the template's own names, whatever they are
            )
        except _RENDER_ERRORS as error:
            roles = ", ".join(str(message.get("role")) for message in messages[-4:])
            raise InvalidInputError(
                f"the chat template refuses the messages ({error}); their roles end with {roles}; nothing was sent"
            ) from error
        return str(text)

    def encode(self, text: str, *, after: int | None = None) -> Encoded:
        """Return the ids of `text` as they are behind the token `after`; None when nothing comes before it."""
        anchor = "" if after is None or text.startswith(tuple(self._spellings.values())) else self._anchor(after)
        tokens, starts = self._encode(anchor + text)
        first = sum(start < len(anchor) for start in starts)
        tokens, starts = tokens[first:], [start - len(anchor) for start in starts[first:]]
        if after is None and len(tokens) > 1 and tokens[0] == tokens[1] == self._tokenizer.bos_token_id:
            tokens, starts = tokens[1:], starts[1:]  # BOS at most once
        return Encoded(tokens, starts)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the exact text of the tokens, special ones included."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _anchor(self, after: int) -> str:
        """Return the text of a special token to encode behind: without one, some tokenizers put a space first."""
        return self._spellings.get(after, next(iter(self._spellings.values()), ""))

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        if not text:
            return [], []
        if not self._tokenizer.is_fast:
            tokens = [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]
            return tokens, self._starts_by_decoding(text, tokens)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoding["input_ids"]), [int(start) for start, _ in encoding["offset_mapping"]]

    def _starts_by_decoding(self, text: str, tokens: list[int]) -> list[int]:
        """Return where each token begins, for tokenizers that do not say: by the text of those before it."""
        return [min(len(self.decode(tokens[:index])), len(text)) for index in range(len(tokens))]
