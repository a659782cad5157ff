"""The command line: the words of the API for people, and with `--json` for programs.

parser.py knows the words, app.py runs one, the other files are what they do. A command takes the parsed arguments and
returns a `Result`; nothing but app.py prints.
"""

from agentmem.cli.app import main

__all__ = ["main"]
