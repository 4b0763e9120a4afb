"""Which pages of the KV pool are free. Pure Python: knows no tensor and not what a page holds."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than asked for; nothing was allocated."""


class PageAllocator:
    """Hands out the page numbers `0 … pages-1`. The page freed last is given first, as its memory is the warmest."""

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of at least one token, got {pages} pages of {page_size}")
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * pages)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` KV rows need."""
        return -(-tokens // self.page_size)

    def allocate(self, n: int) -> list[int]:
        """`n` distinct free pages. Raises OutOfPages, and takes none, when fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > len(self._free):
            raise OutOfPages(f"{n} KV pages asked for, {len(self._free)} of {self.pages} free")
        taken = self._free[len(self._free) - n :][::-1]
        del self._free[len(self._free) - n :]
        for page in taken:
            self._is_free[page] = 0
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. All of them must be allocated and distinct, else ValueError and none is freed."""
        pages = list(pages)
        for i, page in enumerate(pages):
            if not 0 <= page < self.pages or self._is_free[page]:
                for undo in pages[:i]:
                    self._is_free[undo] = 0
                what = "freed twice" if 0 <= page < self.pages else f"not one of the {self.pages} of this pool"
                raise ValueError(f"KV page {page} is {what}")
            self._is_free[page] = 1
        self._free.extend(reversed(pages))
