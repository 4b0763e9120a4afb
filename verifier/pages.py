"""Which pages of the KV pool are free, held, or kept for their content. Pure Python: knows no tensor and no request.

A full page of committed rows is named by a key that stands for all tokens up to its end. It may be kept under that key:
sequences whose tokens begin the same way share it, and nobody writes it any more. A kept page that nobody holds stays
until its memory is needed; the one unused for longest goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than asked for; nothing was allocated."""


def page_keys(tokens: Sequence[int], page_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """One key for each full page of `tokens`; `known` are those of the first pages, computed before."""
    keys = list(known)
    for begin in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        page = array("q", tokens[begin : begin + page_size]).tobytes()
        keys.append(blake2b((keys[-1] if keys else b"") + page, digest_size=16).digest())
    return keys


class PageAllocator:
    """Hands out the page numbers `0 … pages-1`. The page freed last is given first, as its memory is the warmest."""

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of at least one token, got {pages} pages of {page_size}")
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        self._page_of: dict[bytes, int] = {}  # kept pages
        self._key_of: dict[int, bytes] = {}  # the same, the other way round
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept pages without a holder, the longest unused first

    @property
    def free_pages(self) -> int:
        """Pages that `allocate` can give, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def kept_pages(self) -> int:
        """Pages whose content can be shared."""
        return len(self._key_of)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` KV rows need."""
        return -(-tokens // self.page_size)

    def allocate(self, n: int) -> list[int]:
        """`n` distinct pages, one holder each. Raises OutOfPages, and takes none, when fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > self.free_pages:
            raise OutOfPages(f"{n} KV pages asked for, {self.free_pages} of {self.pages} free")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def keep(self, page: int, key: bytes) -> None:
        """The held page's rows are complete and stand for `key`. Nothing happens where another page does already."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def keeps(self, key: bytes) -> bool:
        """Whether `share` would find this page."""
        return key in self._page_of

    def share(self, keys: Iterable[bytes]) -> list[int]:
        """The kept pages of the longest run of `keys` from the first on, each with one more holder."""
        shared = []
        for key in keys:
            if (page := self._page_of.get(key)) is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            shared.append(page)
        return shared

    def forget(self, pages: Iterable[int] | None = None) -> None:
        """The content of these pages, or of all, is not to be shared any more. Who holds a page goes on holding it."""
        for page in list(self._key_of) if pages is None else pages:
            if (key := self._key_of.pop(page, None)) is not None:
                del self._page_of[key]
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def free(self, pages: Iterable[int]) -> None:
        """One holder less for each. All of them must be held and distinct, else ValueError and nothing changes."""
        pages, seen = list(pages), set()
        for page in pages:
            if not 0 <= page < self.pages:
                raise ValueError(f"KV page {page} is not one of the {self.pages} of this pool")
            if not self._holders[page] or page in seen:
                raise ValueError(f"KV page {page} is freed twice")
            seen.add(page)
        for page in reversed(
            pages
        ):  # of a sequence's pages the first is the one most likely to be shared: it goes last
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
