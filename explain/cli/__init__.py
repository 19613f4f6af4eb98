"""`explain image.jpg`: arguments in, printed lines and an exit code out.

    program     words in, an exit code out; imports all commands
    interrupts  Ctrl-C while a library is being imported
    commands    the group of all commands, defaults from a file, errors in one line; options that
                several commands have
    output      lines or one JSON document, errors, notes; exit codes; a bar with the time that is
                left
    several     photos and models by the names that were typed; the same work for each of several
                photos
    questions   methods, metrics, baselines and targets as they were typed; options without effect
    photos      `explain PHOTO`
    views       `explain layers`, `inspect`, `concepts`, `trace`
    runs        `explain run`, `export`, `insight`, `repair`, `film`
    server      `explain serve`
    lists       `explain methods`, `metrics`, `models`, `version`, `completion`

A command is a function with its options above it. What is slow to load is imported within the
function, so that ``--help`` does not wait for it.
"""

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code.

    0 if all is done; 1 if a photo could not be explained or a file not written; 2 if what was asked
    for cannot be done whatever the photo, as with an option, method, model, layer or label that
    does not exist; 130 if interrupted.
    """
    try:
        # here, so that an interrupt while it is loaded ends without a traceback
        from explain.cli.program import exit_code

        return exit_code(arguments)
    except KeyboardInterrupt:
        return 130  # `INTERRUPTED`, which may not be loaded yet
