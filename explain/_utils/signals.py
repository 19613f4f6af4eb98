"""Beginnings and ends that no signal can split.

Python runs a signal's handler between two lines of the main thread, and what the handler raises
(`KeyboardInterrupt`, the `TimeoutError` of a time limit) leaves from there. In a context that
changes something this is harmless inside the block, but not between the lines of its beginning or
its end: what has been changed would stay so. So while a block lasts, a handler of ours stands in
front of the caller's own. It passes each signal on at once, except during a beginning or an end:
there the signal waits until that is done. None is lost, and none comes twice. Code of `contextlib`
counts as part of a beginning or end too, where this package has called it.

Ours is a handler for the main thread only, as Python's are. Other threads receive no signals and
need nothing.
"""

import _signal  # type: ignore[import-not-found]  # `signal` itself spends 2 µs a call on making enums
import _weakrefset
import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from types import CodeType, FrameType, FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

_NAMES = [
    "INT",
    "TERM",
    "HUP",
    "ALRM",
    "VTALRM",
    "PROF",
    "USR1",
    "USR2",
    "QUIT",
    "BREAK",
    "CHLD",
    "IO",
    "WINCH",
]
_SIGNALS = tuple(
    int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}")
)
_WEAK = (weakref.__file__, _weakrefset.__file__)
_main = threading.main_thread().ident
# signals that came during a beginning or end, with the caller's handlers, the first first
_waiting: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []


@dataclass(eq=False)
class _InFront:
    """A handler that stands in front of a caller's own, ``theirs``, and passes signals on to it."""

    theirs: Callable[[int, FrameType | None], Any]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_amid(frame) or _is_in_a_context_of_ours(frame) or _is_where_errors_are_lost(frame):
            _waiting.append((number, self.theirs))
        else:
            _handle(number, self.theirs, frame)


def came_by_signal(error: BaseException) -> bool:
    """Whether a signal handler of the caller's raised an error, which ``except Exception`` must let
    pass: a time limit is not a broken layer.
    """
    return hasattr(error, "_came_by_signal")


class SignalSafe(Generic[T]):
    """A context whose beginning ``on_enter``, which gives what ``with`` binds, and end ``on_exit``
    are never split by a signal. Subclasses write both."""

    _in_front: tuple[tuple[int, _InFront], ...] = ()

    on_enter: Callable[[], T]
    on_exit: Callable[[BaseException | None], None]
    """Given the error that ended the block, if any; also called after an ``on_enter`` that raised.
    So it must put back what has been changed so far, and no more: ``on_enter`` records what there
    was before it changes it."""

    def __enter__(self) -> T:
        """Begin the block by ``on_enter`` while signals wait; they are handled before the block
        begins. Where their handlers or ``on_enter`` raise, ``on_exit`` is called.
        """
        self._in_front = _step_in_front()
        try:
            bound = self.on_enter()
            if _waiting:
                _hand_over(sys._getframe(1))
        except BaseException as error:
            try:
                self.on_exit(error)
            finally:
                _step_aside(self._in_front, sys._getframe(1))
            raise
        return bound

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End the block by ``on_exit``, while signals wait; they are handled afterwards."""
        try:
            self.on_exit(error)
        finally:
            if _waiting or self._in_front:
                _step_aside(self._in_front, sys._getframe(1))


class _FromGenerator(SignalSafe[T]):
    """See `signal_safe`."""

    def __init__(self, steps: Generator[T, None, None]) -> None:
        self._steps = steps

    def on_enter(self) -> T:
        return next(self._steps)

    def on_exit(self, error: BaseException | None) -> None:
        """Let the generator go on after its ``yield``, or raise the block's error there. The same
        error coming back is not raised here: the ``with`` statement does.
        """
        if error is None:
            next(self._steps, None)
            return
        trace = error.__traceback__
        try:
            self._steps.throw(error)
        except BaseException as raised:
            # Python wraps a StopIteration
            if raised is not error and raised.__cause__ is not error:
                raise
            # without this frame, which holds the error: they would keep each other alive
            error.__traceback__ = trace


def signal_safe(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """`contextlib.contextmanager` for a context whose beginning and end are never split by a
    signal."""

    @wraps(function)
    def begun(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _FromGenerator(cast("Generator[T, None, None]", function(*args, **kwargs)))

    return begun


class _Temporarily(SignalSafe[None]):
    """See `temporarily`."""

    def __init__(self, holder: object, values: dict[str, Any]) -> None:
        """Note the attributes of ``holder`` that are to be changed, with the values that they have
        now."""
        self._attributes = vars(holder)
        self._values = values
        self._previous = {name: getattr(holder, name) for name in values}

    def on_enter(self) -> None:
        self._attributes.update(self._values)

    def on_exit(self, error: BaseException | None) -> None:
        self._attributes.update(self._previous)


def temporarily(holder: object, **values: Any) -> AbstractContextManager[None]:
    """Within this block, give attributes of an object other values; its end restores the earlier
    ones, also where a signal comes in between. The object must have them already."""
    return _Temporarily(holder, values)


lock = threading.RLock()


@dataclass(eq=False)
class _ChangedSetting:
    """A setting of the process that is changed: a context whose end restores it, and how many
    blocks need it so."""

    context: Any
    blocks: int = 0


_shared: dict[Any, _ChangedSetting] = {}


class Shared(SignalSafe[None]):
    """Change settings of the process: the first of several threads changes them, and the last one
    restores them. Each is changed by a function, which returns a context whose end restores it.
    """

    def __init__(self, changes: Mapping[Any, Callable[[], Any]]) -> None:
        self._changes = changes
        self._held: list[Any] = []

    def on_enter(self) -> None:
        """Change each setting that no block has changed yet, and count this block for all of
        them."""
        with lock:
            for setting, change in self._changes.items():
                if setting not in _shared:
                    _shared[setting] = _ChangedSetting(change())
                _shared[setting].blocks += 1
                self._held.append(setting)

    def on_exit(self, error: BaseException | None) -> None:
        """Count this block off, and restore each setting that no other block needs; only settings
        that ``on_enter`` has got to are touched."""
        with lock:
            for setting in reversed(self._held):
                changed = _shared.get(setting)
                if changed is None:  # in a forked child, which has restored all of them
                    continue
                changed.blocks -= 1
                if not changed.blocks:
                    del _shared[setting]
                    changed.context.__exit__(None, None, None)

    def held_alone(self) -> list[Any]:
        """The contexts of the settings that no other block has changed too."""
        with lock:
            held = map(_shared.get, self._held)
            return [changed.context for changed in held if changed and changed.blocks == 1]


def deferring_signals(function: Callable[P, T]) -> Callable[P, T]:
    """Let signals wait that come while ``function`` runs; they are handled when it is done."""

    @wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function while signals wait, and handle them when it has returned or raised."""
        in_front = _step_in_front()
        try:
            return function(*args, **kwargs)
        finally:
            if _waiting or in_front:
                _step_aside(in_front, sys._getframe(1))

    _WHOLE.add(cast(FunctionType, whole).__code__)
    return whole


_WHOLE: set[CodeType] = {SignalSafe.__enter__.__code__, SignalSafe.__exit__.__code__}


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a Python frame and those that have called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_amid(frame: FrameType | None) -> bool:
    """Whether an interrupted frame runs inside a beginning or end that must not be split
    (`_WHOLE`), from the innermost up to a handler of the caller's, which may be split.
    """
    for caller in _stack(frame):
        if caller.f_code in _WHOLE:
            return True
        # `_handle` itself, when it is interrupted, has not called the caller's handler yet
        if caller.f_code is _handle.__code__ and caller is not frame:
            return False
    return False


def _is_in_a_context_of_ours(frame: FrameType | None) -> bool:
    """Whether a frame is one of `contextlib` that this package has called.
    A signal there must not keep a context from being left, or from being noted as entered.
    """
    caller = next(
        (outer for outer in _stack(frame) if outer.f_code.co_filename != contextlib.__file__), None
    )
    # the first frame outside of contextlib: where it is ``frame`` itself, none of contextlib runs
    return (
        caller not in (None, frame)
        and str(caller.f_globals.get("__name__", "")).split(".")[0] == "explain"
    )


def _is_where_errors_are_lost(frame: FrameType | None) -> bool:
    """Whether a frame is inside what a weak collection does when a member dies, where Python only
    prints errors. A signal there would be lost. It waits for the next beginning or end of a block.
    """
    codes = (caller.f_code for caller in _stack(frame))
    return any(
        code.co_filename in _WEAK and code.co_name in ("_remove", "remove") for code in codes
    )


def _step_in_front() -> tuple[tuple[int, _InFront], ...]:
    """Put a handler (`_InFront`) before each of the caller's that has none yet; returns the new
    ones with their signals. Nothing is done outside of the main thread.
    """
    if threading.get_ident() != _main:
        return ()
    new_handlers: list[tuple[int, _InFront]] = []
    try:
        for signal_number in _SIGNALS:
            theirs = _signal.getsignal(signal_number)  # a number where the system handles it
            if theirs.__class__ not in (int, _InFront) and callable(theirs):
                ours = _InFront(theirs)
                new_handlers.append((signal_number, ours))
                _signal.signal(signal_number, ours)
    except ValueError:  # an interpreter inside another one has no signals
        return ()
    except BaseException:  # raised by a caller's handler that ours was about to replace
        _step_aside(tuple(new_handlers), caller=None)
        raise
    return tuple(new_handlers)


def _step_aside(in_front: tuple[tuple[int, _InFront], ...], caller: FrameType | None) -> None:
    """Call the caller's handlers for signals that waited, and put them back in place of
    ``in_front``. ``caller`` is the block's frame, or None where no handler is to be called.
    """
    try:
        if caller is not None and _waiting:
            _hand_over(caller)
    finally:
        if in_front:
            try:
                _give_back(in_front)
            except BaseException:  # raised by a handler that was given back while others still wait
                _give_back(in_front)
                raise
            if caller is not None and _waiting:
                _hand_over(caller)


def _give_back(in_front: tuple[tuple[int, _InFront], ...]) -> None:
    """Put the caller's signal handlers back, except where somebody has set another one meanwhile;
    in the main thread only, as Python demands."""
    if threading.get_ident() != _main:  # ours stays in front, and goes on handing over
        return
    for signal_number, ours in in_front:
        if _signal.getsignal(signal_number) is ours:
            _signal.signal(signal_number, ours.theirs)


def _hand_over(caller: FrameType | None) -> None:
    """Call the caller's handlers for signals that waited, in order, all even if one raises, unless
    ``caller`` is itself inside something that must not be split: then they wait on.
    """
    if not _waiting or threading.get_ident() != _main or _is_amid(caller):
        return
    signal_number, callers_handler = _waiting.pop(0)
    try:
        _handle(signal_number, callers_handler, caller)
    finally:
        _hand_over(caller)


def _handle(
    signal_number: int,
    callers_handler: Callable[[int, FrameType | None], Any],
    frame: FrameType | None,
) -> None:
    """Call the caller's handler of a signal with the interrupted frame,
    and mark what it raises for `came_by_signal`."""
    try:
        callers_handler(signal_number, frame)
    except Exception as error:
        error._came_by_signal = True  # type: ignore[attr-defined]
        raise


def _begin_child() -> None:
    """After a fork, drop waiting signals, restore the caller's handlers and what blocks of the
    parent had changed (they end there), and release the lock taken before it.
    """
    global _main
    _main = threading.get_ident()
    _waiting.clear()
    for number in _SIGNALS:
        handler = _signal.getsignal(number)
        while type(handler) is _InFront:  # one may stand in front of another
            handler = handler.theirs
            _signal.signal(number, handler)
    settings = list(_shared.values())
    _shared.clear()
    for changed in settings:
        changed.context.__exit__(None, None, None)
    lock.release()


def at_fork(**callbacks: Callable[[], Any]) -> None:
    """Call functions when this process is forked, as `os.register_at_fork` does; on systems without
    forks, do nothing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**callbacks)


at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=_begin_child)
