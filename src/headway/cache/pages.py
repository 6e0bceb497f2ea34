"""The page pool: reference counts of pages, and the prefixes that are kept for later sequences (the prefix cache).

Pages are appended to and released, and never overwritten while another sequence may read them; a forked sequence, or
one that begins with a stored prefix, shares pages by reference (`headway.cache.page_table`). This module holds page
numbers only, no tensors.
"""

from collections.abc import Hashable, Iterable, Sequence

from headway.cache.page_table import PAGE, Copy, PageClass, Pages, PageTable, root_key, sees
from headway.errors import CacheError


class PagePool:
    """Pages of all layer classes of a model, within a budget of bytes.

    A sequence has a `PageTable` from `open` to `close`; in between, `extend` makes room for its next tokens, `settle`
    is called when they are computed, `trim` discards some, `fork` copies it.

    Args:
        classes: the classes of layers.
        budget: most bytes of pages that are in use or kept as prefixes; None is no bound.
        keep: most bytes of unused pages that stay as prefixes; None is all that the budget leaves.

    Attributes:
        stored: the pages of each class.
    """

    def __init__(
        self, classes: Sequence[PageClass], budget: int | None = None, *, keep: int | None = None
    ) -> None:
        self.classes, self.budget, self.keep = tuple(classes), budget, keep
        self.stored = [Pages(kind) for kind in self.classes]
        self.has_states = any(kind.state for kind in self.classes)
        self._now = 0

    def open(self, ids: Sequence[int] = (), root: Hashable = ()) -> PageTable:
        """Returns the page table of a sequence that begins with `ids`. Its `len` is the length of the longest stored
        prefix: one of which every class holds what later queries attend to, and that leaves at least one of the ids to
        be computed.

        root: everything else that keys depend on (adapter, dtype); only sequences with equal roots share pages."""
        table = PageTable(root_key(root), list(ids), [[] for _ in self.classes])
        length = self._hit(table)
        count = length // PAGE
        for pages, numbers in zip(self.stored, table.pages, strict=True):
            if pages.kind.state:
                shared: list[int | None] = [pages.page[table.key(count - 1)]] if count else []
            else:
                needed = {*pages.kind.needed(length)}
                shared = [pages.page[table.key(p)] if p in needed else None for p in range(count)]
            for page in shared:
                if page is not None:
                    pages.share(page)
            numbers += shared
        del table.ids[length:], table.keys[count:]
        table.marks.add(length)  # the prefix is kept for later sequences
        return table

    def fates(self, ids: Sequence[int], root: Hashable = ()) -> list[list[str]]:
        """Returns the states of the full pages of a sequence, for each class: "shared" or "used" if several open
        sequences use it or one does, "kept" if it is idle, "released" if no later token attends to it, else "gone". Any
        thread may call this."""
        table = PageTable(root_key(root), list(ids), [])
        numbers = range(len(ids) // PAGE)
        return [[pages.fate(table, page) for page in numbers] for pages in self.stored]

    def _hit(self, table: PageTable) -> int:
        """Returns the longest prefix, in tokens, that all classes hold: a length L for which every class has all pages
        that the query after L tokens may attend to, or the state."""
        count = max(len(table.ids) - 1, 0) // PAGE
        for pages in self.stored:
            if pages.kind.retention.reach is None and not pages.kind.state:
                count = next((p for p in range(count) if table.key(p) not in pages.page), count)
        while count and not all(pages.hold(table, count) for pages in self.stored):
            count -= 1
        return count * PAGE

    def fork(self, table: PageTable) -> PageTable:
        """Returns a new sequence with the same tokens, which shares the pages."""
        self._check(table)
        table.room = 0
        for pages, numbers in zip(self.stored, table.pages, strict=True):
            for page in numbers:
                if page is not None:
                    pages.share(page)
        return PageTable(
            table.root,
            list(table.ids),
            [list(numbers) for numbers in table.pages],
            list(table.keys),
            set(table.marks),
            set(table.globals),
        )

    def close(self, table: PageTable) -> None:
        """Ends a sequence; the pages of its prefixes stay as long as there is room."""
        self._check(table)
        for pages, numbers in zip(self.stored, table.pages, strict=True):
            for page in reversed(numbers):  # the free list is a stack: they are taken again in their order
                if page is not None:
                    pages.drop(page, self._now)
        for key in reversed(table.keys):  # the ends of a chain are evicted before their beginnings
            self._now += 1
            for pages in self.stored:
                pages.touch(key, self._now)
        table.pages, table.closed = [[] for _ in self.classes], True
        self._bound()

    def most(self, length: int, step: int) -> int:
        """Returns the most bytes of pages that a sequence of up to `length` tokens holds, if a step reads at most
        `step` of them."""
        return sum(kind.nbytes * kind.most(length, step) for kind in self.classes)

    def missing(self, table: PageTable, count: int) -> int:
        """Returns the bytes of pages that `count` more tokens of a sequence would take."""
        wanted = 0
        for pages, numbers in zip(self.stored, table.pages, strict=True):
            if pages.kind.state:
                new = int(not numbers or pages.may_be_read(numbers[0]))
            else:  # with the copy of a shared last page
                appends = len(table) % PAGE != 0 and count > 0
                new = -(-(len(table) + count) // PAGE) - len(numbers)
                new += int(appends and pages.may_be_read(numbers[-1]))
            wanted += pages.kind.nbytes * new
        return wanted

    @property
    def available(self) -> int | None:
        """Bytes that can be allocated, idle pages included; None is no bound."""
        if self.budget is None:
            return None
        return self.budget - self.held + self.idle

    def extend(self, table: PageTable, ids: Iterable[int]) -> list[Copy]:
        """Makes room for the next tokens of a sequence and returns the copies to make before they are stored.

        Raises CacheError, and changes nothing, if the budget has no room for them."""
        self._check(table)
        new = list(ids)
        if not new or len(table.ids) + len(new) <= table.room:
            table.ids += new
            return []
        if (left := self.available) is not None and (need := self.missing(table, len(new))) > left:
            raise CacheError(
                f"PagePool: {len(new)} more tokens take {need} bytes of pages, but {left} of {self.budget} are left"
            )
        copies = []
        for of, (pages, numbers) in enumerate(zip(self.stored, table.pages, strict=True)):
            is_state = pages.kind.state
            if (is_state and numbers) or (not is_state and len(table) % PAGE):
                old = numbers[-1]
                assert old is not None
                if pages.may_be_read(old):
                    numbers[-1] = page = self._take(pages)
                    table.version += 1
                    copies.append(Copy(of, old, page))
                    pages.drop(old, self._now)
            last = 1 if is_state else -(-(len(table) + len(new)) // PAGE)
            while len(numbers) < last:
                numbers.append(self._take(pages))
                table.version += 1
        table.ids += new
        table.room = -(-len(table) // PAGE) * PAGE
        if copies:  # without copies no page has lost its last user
            self._bound()
        return copies

    def _take(self, pages: Pages) -> int:
        """Takes a page of a class. If the budget is full, idle pages are evicted, the least recently used first."""
        if self.budget is not None:
            while self.held + pages.kind.nbytes > self.budget and self.idle:
                self._evict()
        return pages.take()

    def _evict(self) -> None:
        """Evicts the least recently used page of all classes."""
        min((pages for pages in self.stored if pages.idle), key=lambda p: next(iter(p.idle.values()))).evict()

    def _bound(self) -> None:
        """Evicts idle pages until those that remain take at most `keep` bytes."""
        while self.keep is not None and self.idle > self.keep:
            self._evict()

    @property
    def held(self) -> int:
        """Bytes of pages that are in use or kept."""
        return sum(pages.held for pages in self.stored)

    @property
    def idle(self) -> int:
        """Bytes of pages that are kept and that no sequence uses."""
        return sum(pages.kept for pages in self.stored)

    def check_trim(self, table: PageTable, count: int) -> None:
        """Raises CacheError if the last `count` tokens cannot be discarded: for a class of states, for more tokens than
        there are, and if keys that the tokens before them attend to have been released (`slack`)."""
        self._check(table)
        length = len(table) - count
        if not 0 <= length <= len(table):
            raise CacheError(f"PagePool: cannot trim {count} tokens of a text of {len(table)}")
        if not count:
            return
        kept_pages = -(-length // PAGE)
        for kind, numbers in zip(self.classes, table.pages, strict=True):
            if kind.state:
                raise CacheError(
                    "PagePool: a recurrent state cannot be trimmed; fork the text before the tokens are read"
                )
            if any(numbers[p] is None and sees(kind.retention, p, length) for p in range(kept_pages)):
                raise CacheError(
                    f"PagePool: cannot trim {count} tokens of a text of {len(table)}: layers that keep the last "
                    f"{kind.retention.reach} have released keys that the remaining tokens see; give slack={count}"
                )

    def trim(self, table: PageTable, count: int) -> None:
        """Discards the last `count` tokens. Raises CacheError, and changes nothing, as `check_trim` does."""
        self.check_trim(table, count)
        length, last = len(table) - count, -(-(len(table) - count) // PAGE)
        table.room = 0
        del table.ids[length:], table.keys[length // PAGE :]
        table.globals = {i for i in table.globals if i < length}
        for pages, numbers in zip(self.stored, table.pages, strict=True):
            while len(numbers) > last:
                page, table.version = numbers.pop(), table.version + 1
                assert page is not None
                pages.drop(page, self._now)
        self._bound()

    def settle(self, table: PageTable) -> None:
        """Marks the tokens as stored: full pages become findable by other sequences, and pages that no later query of
        this one attends to are released."""
        self._check(table)
        for p in range(len(table.keys), len(table) // PAGE):
            key = table.key(p)
            for pages, numbers in zip(self.stored, table.pages, strict=True):
                page = None if pages.kind.state else numbers[p]
                if page is not None:
                    pages.publish(page, key)
        for pages, numbers in zip(self.stored, table.pages, strict=True):
            kind = pages.kind
            if kind.state or kind.retention.reach is None:
                continue
            for p in range(len(numbers) - 1, -1, -1):
                page = numbers[p]
                if page is None and p * PAGE >= kind.retention.sinks:
                    break
                if page is not None and not kind.kept(p, len(table), table.globals):
                    needed = any(p in kind.needed(mark) for mark in kind.checkpoints(p, table.marks))
                    pages.drop(page, self._now, keep=needed)
                    numbers[p] = None
                    self._bound()

    def snapshot(self, table: PageTable) -> list[Copy]:
        """Keeps the states of a sequence whose length is a multiple of 64 as a prefix, if there is room, and returns
        the copies to make."""
        self._check(table)
        copies: list[Copy] = []
        if self.keep == 0 or len(table.ids) % PAGE:
            return copies
        for of, (pages, numbers) in enumerate(zip(self.stored, table.pages, strict=True)):
            if not (pages.kind.state and table.ids):
                continue
            key, available = table.key(len(table) // PAGE - 1), self.available
            if key in pages.page or (available is not None and pages.kind.nbytes > available):
                continue
            state, page = numbers[0], self._take(pages)
            assert state is not None
            copies.append(Copy(of, state, page))
            pages.publish(page, key)
            pages.drop(page, self._now)
        self._bound()
        return copies

    def compact(self) -> list[list[int]]:
        """Renumbers the kept pages from 0 on, and returns their old numbers for each class. Raises CacheError while a
        page is in use."""
        if self.held > self.idle:
            raise CacheError("PagePool: pages in use cannot be renumbered; close the texts first")
        return [pages.compact() for pages in self.stored]

    def _check(self, table: PageTable) -> None:
        if table.closed:
            raise CacheError("PagePool: the text's page table is closed; open a new one")

    def taken(self, of: int) -> int:
        """Returns an upper bound of a class's page numbers: the number of pages that it ever had at once."""
        return len(self.stored[of].users)
