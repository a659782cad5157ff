"""What a checkpoint at every turn of a 50-turn chat costs, beside the same chat with saving off.

    python benchmarks/chat.py [--quick]

Two sessions in two stores have the same chat, a turn of one and then the same turn of the other. One saves in the
background and makes a durable checkpoint (fsync) after every turn; the other saves nothing until it is closed. Nothing
is left to save between turns: the checkpoint waits for it, inside the time of its turn.
"""

from pathlib import Path

from harness import Options, Times, check, load_model, main, read_tokens, say

import agentmem
from agentmem.session import Session

NUM_TURNS = 50
NUM_USER_TOKENS = 32
NUM_ANSWER_TOKENS = 24
MAX_RATIO = 1.05


def run(options: Options) -> dict[str, object]:
    """Have the chat twice, turn by turn."""
    model, tokenizer = load_model(options)
    num_turns = options.repeats(full=NUM_TURNS, quick=10)
    text = read_tokens(tokenizer, num_turns * NUM_USER_TOKENS)
    saving, plain, checkpoints = Times(), Times(), Times()
    folder = options.folder
    off = agentmem.Config(save_in_background=False)
    with (
        agentmem.open(_fresh(folder, "saving"), model=model, tokenizer=tokenizer) as store,
        agentmem.open(_fresh(folder, "plain"), model=model, tokenizer=tokenizer, config=off) as other,
    ):
        with_saving, without = store.create("chat"), other.create("chat")
        for number in range(num_turns):
            asked = text[number * NUM_USER_TOKENS : (number + 1) * NUM_USER_TOKENS]
            with plain.run():
                take_turn(without, asked)
            with saving.run():
                take_turn(with_saving, asked)
                with checkpoints.run():
                    with_saving.checkpoint(f"turn {number}")
            if number % 10 == 9:
                say(f"  turn {number + 1}: {sum(saving.wall_s) / sum(plain.wall_s):.3f}x")
        num_tokens = with_saving.active.num_tokens
        if with_saving.active.tokens != without.active.tokens:
            raise RuntimeError("the two chats went different ways")
        stats = store.stats()
    ratio = sum(saving.wall_s) / sum(plain.wall_s)
    row = {
        "turns": num_turns,
        "tokens": num_tokens,
        "saving off s": sum(plain.wall_s),
        "checkpoint every turn s": sum(saving.wall_s),
        "ratio": ratio,
        "ratio of CPU time": sum(saving.cpu_s) / sum(plain.cpu_s),
        **checkpoints.columns("checkpoint ms", 1e3),
        "written MB": stats["disk_stored_nbytes"] / 1e6,
    }
    return {
        "benchmark": "chat",
        "what": f"{NUM_USER_TOKENS} tokens asked and {NUM_ANSWER_TOKENS} answered a turn",
        "rows": [row],
        "checks": [check("with a checkpoint every turn / saving off", ratio, MAX_RATIO)],
    }


def take_turn(session: Session, asked: list[int]) -> None:
    """Add what the user says and generate the answer, greedily and of a fixed length."""
    session.append(asked)
    session.generate(max_new_tokens=NUM_ANSWER_TOKENS, min_new_tokens=NUM_ANSWER_TOKENS, do_sample=False)


def _fresh(folder: Path, name: str) -> Path:
    return folder / f"chat-{name}"


if __name__ == "__main__":
    main(run)
