# SPDX-License-Identifier: Apache-2.0
"""vLLM's pool of pages and its prefix cache, as far as they decide what is found and what is lost.

Pages that are free and hold nothing of use are alike, so they are only counted. Those that are free
and still serve prefix hits wait in a queue; the one that was freed first is taken first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class Page:
    """A page that is held, or free and found by its name.

    Attributes:
        holders: how many block tables hold it.
        name: of its content, under which the prefix cache finds it; None if it does not.
        shelf: where it is found.
    """

    __slots__ = ("holders", "name", "shelf")

    holders: int
    name: Hashable | None
    shelf: Shelf | None

    def __init__(self) -> None:
        self.holders = 1
        self.name = None
        self.shelf = None


class Shelf:
    """The prefix cache of one page group. Pages of one content stand in the order of entry."""

    __slots__ = ("first", "more")

    def __init__(self) -> None:
        self.first: dict[Hashable, Page] = {}
        self.more: dict[Hashable, list[Page]] = {}

    def enter(self, name: Hashable, page: Page) -> None:
        """Let a page be found by the name of its content."""
        page.name, page.shelf = name, self
        if self.first.setdefault(name, page) is not page:
            self.more.setdefault(name, []).append(page)

    def remove(self, page: Page) -> None:
        """Let a page be found no longer."""
        name, page.name, page.shelf = page.name, None, None
        others = self.more.get(name) if self.more else None
        if self.first[name] is not page:
            assert others is not None
            others.remove(page)
        elif others:
            self.first[name] = others.pop(0)
        else:
            del self.first[name]
        if others is not None and not others:
            del self.more[name]


class Pool:
    """The pages of a replica.

    Attributes:
        pages: how many there are, vLLM's null page not counted.
        blank: those that are free and cannot be found.
        kept: those that are free and can, the next to be taken first.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.blank = pages
        self.kept: OrderedDict[Page, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return self.blank + len(self.kept)

    def take(self, count: int) -> list[Page]:
        """Take free pages: blank ones first, then the one that has been free for longest."""
        assert count <= self.free
        fresh = min(count, self.blank)
        self.blank -= fresh
        taken = [Page() for _ in range(fresh)]
        for _ in range(count - fresh):
            page, _ = self.kept.popitem(last=False)
            assert page.shelf is not None
            page.shelf.remove(page)
            page.holders = 1
            taken.append(page)
        return taken

    def hold(self, pages: Iterable[Page]) -> None:
        """Add a holder to pages that were found."""
        for page in pages:
            if page.holders == 0:
                del self.kept[page]
            page.holders += 1

    def give_back(self, pages: Iterable[Page]) -> None:
        """Take a holder off pages, in the order in which they may be taken by others."""
        for page in pages:
            page.holders -= 1
            if page.holders == 0:
                if page.name is None:
                    self.blank += 1
                else:
                    self.kept[page] = None
