"""Which pages of a drafter's context pool are free. Pure Python: knows no tensor and no sequence."""

from __future__ import annotations

from collections.abc import Iterable


class ContextFull(RuntimeError):
    """The pool has fewer free pages than a call needs; no sequence has changed."""


class FreePages:
    """The page numbers `0 … pages - 1` that nobody has."""

    def __init__(self, pages: int, page_size: int) -> None:
        self._pages, self._page_size = pages, page_size
        self._free = list(range(pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """`n` pages. Raises ContextFull, and takes none, when fewer are free."""
        if n > len(self._free):
            raise ContextFull(
                f"the drafter's contexts need {n} more pages of {self._page_size} tokens, {len(self._free)} of "
                f"{self._pages} are free: release sequences, or give it more context_tokens"
            )
        kept = len(self._free) - n
        taken = self._free[kept:]
        del self._free[kept:]
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Takes back pages that `take` gave."""
        self._free.extend(pages)
