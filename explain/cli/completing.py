"""`explain completion bash`: a script for the shell, which asks `explain completion words` what may come next."""

import argparse

from explain.cli.commands import COMMANDS, EXPLAIN
from explain.cli.listed import items
from explain.cli.output import Output

_BASH = """_explain() {
  COMPREPLY=($(explain completion words -- "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _explain explain"""
SCRIPTS = {
    "bash": _BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}",
    "fish": "complete -c explain -a '(explain completion words -- (commandline -opc)[2..] (commandline -ct))'",
}


def complete(options: argparse.Namespace, answer: Output) -> None:
    """Print the script of a shell, or what may take the place of the last of some words."""
    if options.shell in SCRIPTS:
        answer.say(*SCRIPTS[options.shell].splitlines())
        return
    *before, last = options.words or [""]
    command = COMMANDS.get(before[0] if before else "", EXPLAIN)
    option = command.flags.get(before[-1]) if before else None
    if option is not None and option.how.get("action") != "store_true":
        words = option.words
        found = [item["name"] for item in items(words)] if isinstance(words, str) else words  # none: the shell's files
    else:
        found = [*([] if before else COMMANDS), *(command.flags if last.startswith("-") else ())]
    answer.say(*(word for word in found if word.startswith(last)))
