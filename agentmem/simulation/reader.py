"""Read public traces of prompts: lines of JSON in the format of Mooncake's traces.

    {"timestamp": 3052, "input_length": 7234, "output_length": 794, "hash_ids": [0, 28, 29], "session_id": "a"}

Milliseconds, tokens, and a number for each block of the prompt, the last one unfinished perhaps: the same number is the
same tokens after the same tokens. `session_id` is not in all of them. What was generated has no numbers: it comes back
in the next prompt. Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

import json
from pathlib import Path

from agentmem.errors import InvalidInputError, NotFoundError
from agentmem.simulation.trace import Request, Trace

BLOCK_SIZE = 512
"""Tokens of a block in Mooncake's traces."""


def read_trace(path: Path, *, block_size: int = BLOCK_SIZE) -> Trace:
    """Return the trace in a file.

    Raises:
        NotFoundError: There is no such file.
        InvalidInputError: A line is no request, or one comes before the one ahead of it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no trace {str(path)!r}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{str(path)!r} is no text, so no trace") from error
    requests = [_request(line, f"{path.name}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    return Trace(tuple(requests), block_size)


def _request(line: str, where: str) -> Request:
    try:
        fields = json.loads(line)
        blocks = tuple(int(block) for block in fields["hash_ids"])
        found = Request(
            time_s=float(fields["timestamp"]) / 1000,
            branch=str(fields.get("session_id", where)),
            blocks=blocks,
            num_prompt=len(blocks),
            num_input=int(fields["input_length"]),
            num_output=int(fields["output_length"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidInputError(
            f"{where} is no request: a line is a JSON object with timestamp, input_length, output_length and hash_ids"
        ) from error
    if len(set(blocks)) != len(blocks) or min(found.num_input, found.num_output) < 0:
        raise InvalidInputError(f"{where} is no request: it has a block twice, or less than no tokens")
    return found
