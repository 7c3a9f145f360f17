"""Changes to several objects that happen all or not at all, whatever interrupts them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Settles(Protocol):
    """Something that keeps counts of what others hold, and can count anew."""

    def settle(self) -> None:
        """Makes the counts agree with what is held. May be interrupted and done again."""


class Change(NamedTuple):
    """A part of a change.

    Attributes:
        target: the object.
        attributes: new values of its attributes. They replace the old ones, which nobody modifies.
        count: brings counts in line with the new values; what it changes is opened in the ledger first.
    """

    target: Any
    attributes: dict[str, Any]
    count: Callable[[], None] | None = None


class Ledger:
    """Knows what a change in progress would have to restore.

    An exception may come between any two operations, `KeyboardInterrupt` for one. So a change is planned without
    touching anything, and made by `commit`, a run of plain assignments. Until its end `recover` leads back to the
    state before, and afterwards to the new one. Counts that follow from a state are counted anew then.

    Whoever calls a method holds the lock that belongs to the objects.
    """

    def __init__(self) -> None:
        self._before: Sequence[tuple[Any, dict[str, Any]]] = ()
        self._open: list[Settles] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_before": (), "_open": []}

    def open(self, counts: Settles) -> bool:
        """Says that some counts are about to change; whether that was not said before."""
        if counts in self._open:
            return False
        self._open.append(counts)
        return True

    def close(self, counts: Settles) -> None:
        """Says that some counts are right again."""
        self._open.remove(counts)

    def is_open(self, counts: Settles) -> bool:
        """Whether some counts are in the middle of a change."""
        return counts in self._open

    def commit(self, changes: Sequence[Change]) -> None:
        """Makes all changes, and closes what was opened for them."""
        before = [(target, {name: vars(target)[name] for name in attributes}) for target, attributes, _ in changes]
        self._before = before
        for target, attributes, _ in changes:
            vars(target).update(attributes)
        for _, _, count in changes:
            if count is not None:
                count()
        self._before = ()  # the point of no return
        self._open.clear()

    def recover(self) -> None:
        """Ends what was interrupted. Nothing happens if nothing was."""
        if not self._before and not self._open:
            return
        for target, attributes in self._before:
            vars(target).update(attributes)
        for counts in self._open:
            counts.settle()
        self._before = ()
        self._open.clear()

    def __enter__(self) -> "Ledger":
        """What follows happens all or not at all. Not to be nested."""
        self.recover()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: Any) -> None:
        if error_type is not None:
            self.recover()
