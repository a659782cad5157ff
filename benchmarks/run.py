"""Run all benchmarks, one after another, each in a process of its own, and write the results.

    python benchmarks/run.py [--quick] [--only NAME ...] [--contexts N ...] [--threads N] [--folder PATH]

Tables are printed as they come. benchmarks/results/<machine>-<date>.json has all numbers, the .md beside it the tables.
Nothing else should run on the machine meanwhile. `gpu` is not part of it: `python benchmarks/gpu.py`.
"""

import argparse
import datetime
import importlib
import json
import os
import re
import time
import traceback
from pathlib import Path

import harness
from harness import Options, Row, base_store, in_new_process, markdown_table, plain_table, say

NAMES = (
    "open",
    "fork",
    "switch",
    "decode",
    "resume",
    "path",
    "codec",
    "disk",
    "chat",
    "edits",
    "batch",
    "encryption",
    "budgets",
    "churn",
    "checks",
    "tiers",
    "lossy",
)
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run what was asked for; return 1 when a benchmark failed or a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    harness.add_options(parser)
    arguments = parser.parse_args()
    report: dict[str, object] = {"machine": harness.machine(), "command": command_of(arguments), "results": []}
    say(json.dumps(report["machine"], indent=2))
    with harness.chosen_options(arguments) as options:
        report["options"] = {"contexts": options.contexts, "quick": options.is_quick, "threads": options.num_threads}
        if {"fork", "switch", "decode", "resume", "path", "batch", "encryption", "tiers"} & set(arguments.only):
            in_new_process(base_store, options)
        for name in arguments.only:
            report["results"].append(run_one(name, options))
    report["load_average_at_end"] = os.getloadavg()
    write(report)
    claims = all_checks(report)
    say("\n== all claims\n" + plain_table(claims))
    is_failed = any("error" in result for result in report["results"])
    return int(is_failed or not all(claim["is_met"] for claim in claims))


def run_one(name: str, options: Options) -> dict[str, object]:
    """Run one benchmark in a new process and show it; an error is a result too, and the others go on."""
    say(f"\n-- {name} ...")
    started = time.perf_counter()
    try:
        result = in_new_process(measure, name, options)
    except Exception as error:  # noqa: BLE001 - the other benchmarks are still worth running
        traceback.print_exc()
        return {"benchmark": name, "error": repr(error), "rows": [], "checks": []}
    result["elapsed_s"] = time.perf_counter() - started
    harness.show(result)
    return result


def measure(name: str, options: Options) -> dict[str, object]:
    """Call a benchmark's `run`; here, in the new process."""
    module = importlib.import_module(name)
    return codec_result(module.run()) if name == "codec" else module.run(options)


def codec_result(result: dict[str, object]) -> dict[str, object]:
    """Add the claims to the codec's numbers."""
    ours = [row for row in result["rows"] if row["method"] == "agentmem lossless"]
    mean = ours[-1]
    checks = [
        harness.check("smallest ratio of code, prose, JSON", min(row["ratio"] for row in ours), 1.50, is_at_least=True),
        harness.check("encode, MB/s of KV per core", mean["encode_mb_per_s"], 600.0, is_at_least=True),
        harness.check("decode, MB/s of KV per core", mean["decode_mb_per_s"], 1500.0, is_at_least=True),
    ]
    return {**result, "what": "KV to bytes and back, whole records, process CPU time", "checks": checks}


def all_checks(report: dict[str, object]) -> list[Row]:
    """Return every claim with the name of its benchmark."""
    return [
        {"benchmark": result["benchmark"], **claim}
        for result in report["results"]
        for claim in [*result["checks"], *([{"claim": "runs", "is_met": False}] if "error" in result else [])]
    ]


def write(report: dict[str, object]) -> None:
    """Write the numbers as JSON and the tables as Markdown."""
    machine = report["machine"]
    kind = "-quick" if report["options"]["quick"] else ""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = f"{slug(machine['cpu'])}-{machine['num_cores']}-cores-{date}{kind}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (RESULTS / f"{name}.md").write_text(as_markdown(report, name), encoding="utf-8")
    say(f"\nwrote benchmarks/results/{name}.json and .md")


def as_markdown(report: dict[str, object], name: str) -> str:
    """Return the report as a page."""
    machine = report["machine"]
    packages = ", ".join(f"{package} {version}" for package, version in machine["packages"].items())
    options = report["options"]
    lines = [
        f"# {name}",
        f"{machine['cpu']}, {machine['num_cores']} cores, {machine['memory_gib']} GiB, GPU: {machine['gpu']}; "
        f"{machine['system']}; Python {machine['python']}, {packages}; agentmem {machine['agentmem']}.",
        f"Command: `{report['command']}`, {options['threads']} threads, started {machine['started']}; load average "
        f"{machine['load_average'][0]:.2f} at the start, {report['load_average_at_end'][0]:.2f} at the end.",
        "## Claims",
        markdown_table(all_checks(report)),
    ]
    for result in report["results"]:
        lines.append(f"## {result['benchmark']}: {result.get('what', result.get('error', ''))}")
        if result["rows"]:
            lines.append(markdown_table(result["rows"]))
    return "\n\n".join(lines) + "\n"


def slug(text: str) -> str:
    """Return a name that is fit for a file."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def command_of(arguments: argparse.Namespace) -> str:
    """Return the command line that gives the same run, but for the folder."""
    parts = ["python benchmarks/run.py"]
    if arguments.quick:
        parts.append("--quick")
    if tuple(arguments.only) != NAMES:
        parts.append(f"--only {' '.join(arguments.only)}")
    if tuple(arguments.contexts) != harness.CONTEXTS:
        parts.append(f"--contexts {' '.join(map(str, arguments.contexts))}")
    if arguments.threads != harness.DEFAULT_THREADS:
        parts.append(f"--threads {arguments.threads}")
    return " ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
