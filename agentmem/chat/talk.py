"""What a branch and a session say to a chat model: `send` and `chat`. Each hands the work to a `Conversation`."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from agentmem.chat.conversation import ChatOptions, Conversation, Reply
from agentmem.chat.messages import Message, Messages
from agentmem.stats import ReuseReport


class Talk(ABC):
    """A branch, as the messages that it holds."""

    @abstractmethod
    def _conversation(self) -> contextlib.AbstractContextManager[Conversation]:
        """Keep other threads out while messages are sent."""

    @property
    def messages(self) -> list[Message]:
        """The messages that were sent to the branch or that the model answered, as far as its tokens have them."""
        with self._conversation() as conversation:
            return conversation.messages()

    def send(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        thinking: str = "keep",
        template_options: Mapping[str, object] | None = None,
    ) -> ReuseReport:
        """Put messages on the branch, as the tokenizer's chat template writes them. Computes nothing.

        One message is appended behind what is there, which is never rendered again. Of a whole list, everything is kept
        that the branch holds already: ids as they were sampled, where their text is the same. Where the list differs,
        the branch is taken back and goes on with the list; what it was goes on as a branch `main~1`, named in the
        report.

        Args:
            messages: One message: a dict with role and content, or a text of the user's. Or the whole list.
            tools: JSON schemas of the tools, for the template. They are shown once, at the beginning: with one message,
                tools that are not those of the branch change the beginning; None leaves them as they are.
            thinking: "keep", or "strip": with each new message of the user's, the thinking of earlier answers is taken
                out, by going back to the point before it.
            template_options: More names for the template, such as `{"enable_thinking": False}`.

        Returns:
            A report of how many tokens have their KV already, and of where the messages first differ (token, message,
            both texts, why).

        Raises:
            InvalidInputError: There is no chat template, or it refuses the messages. The branch is as it was.
        """
        options = ChatOptions(tools=tools, thinking=thinking, template_options=dict(template_options or {}))
        with self._conversation() as conversation:
            return conversation.send(messages, options)

    def chat(
        self,
        messages: Messages | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        thinking: str = "keep",
        template_options: Mapping[str, object] | None = None,
        **options: object,
    ) -> Reply:
        """Put messages on the branch (see `send`), and let the model answer.

        The ids of the answer stay as sampled. The token that ends it is on the branch once; when the answer ended
        without one, the template's is put behind it as soon as the next message comes.

        Args:
            messages: One message, or the whole list; None to have answered what was sent before.
            tools: As for `send`.
            thinking: As for `send`.
            template_options: As for `send`.
            **options: Options of `generate`.

        Returns:
            A reply with text, ids, message and report.

        Raises:
            KeyboardInterrupt: Or whatever else stops it early: what was sent is taken off again.
            InvalidInputError: There is no chat template, or it refuses the messages, or an option is of no use here.
        """
        request = ChatOptions(tools=tools, thinking=thinking, template_options=dict(template_options or {}))
        with self._conversation() as conversation:
            return conversation.chat(messages, request, options)
