"""The pool of pages: which hold which tokens, their references, and prefixes that are kept for texts to come.

Pages are appended to and released, and never overwritten while somebody may read them; a text that is forked, or begins
as another did, shares pages by reference (`headway.cache.page_table`). Page numbers only, no tensors.
"""

from collections.abc import Hashable, Iterable, Sequence

from headway.cache.page_table import PAGE, Copy, PageClass, Pages, PageTable, root_key, sees
from headway.errors import CacheError


class PagePool:
    """Pages of all classes of a model, within a budget of bytes.

    A text has a `PageTable` from `open` to `close`; between them, `extend` makes room for its next tokens, `settle`
    follows when they are computed, `trim` takes some back, `fork` doubles it.

    Args:
        classes: of layers.
        budget: bytes of pages that are in use or kept for prefixes; None is no bound.
        keep: bytes of pages that stay for prefixes when nobody uses them; None is what the budget leaves.

    Attributes:
        stored: the pages of each class.
    """

    def __init__(
        self, classes: Sequence[PageClass], budget: int | None = None, *, keep: int | None = None
    ) -> None:
        self.classes, self.budget, self.keep = tuple(classes), budget, keep
        self.stored = [Pages() for _ in self.classes]
        self._forgetful = [
            (of, kind)
            for of, kind in enumerate(self.classes)
            if kind.retention.reach is not None and not kind.state
        ]
        self.has_states = any(kind.state for kind in self.classes)
        self._now = 0

    def open(self, ids: Sequence[int] = (), root: Hashable = ()) -> PageTable:
        """A table of a text that begins with `ids`: as many of them are stored already as its `len` says, the longest
        prefix of which every class holds what later queries see. At least one of the ids is left to be computed.

        root: whatever else the keys depend on (adapter, dtype); texts of another root share nothing."""
        table = PageTable(root_key(root), list(ids), [[] for _ in self.classes])
        length = self._hit(table)
        count = length // PAGE
        for kind, pages, numbers in zip(self.classes, self.stored, table.pages, strict=True):
            if kind.state:
                shared: list[int | None] = [pages.page[table.key(count - 1)]] if count else []
            else:
                needed = {*kind.needed(length)}
                shared = [pages.page[table.key(p)] if p in needed else None for p in range(count)]
            for page in shared:
                if page is not None:
                    pages.share(page)
            numbers += shared
        del table.ids[length:], table.keys[count:]
        table.marks.add(length)  # it stays for the next one
        return table

    def fates(self, ids: Sequence[int], root: Hashable = ()) -> list[list[str]]:
        """The fates of the full pages of a text, for each class: "shared" and "used" by several open texts and by
        one, "kept" for those to come, "released" where no later token sees them, or "gone". Any thread may ask."""
        table = PageTable(root_key(root), list(ids), [])
        each = range(len(ids) // PAGE)
        pairs = list(zip(self.classes, self.stored, strict=True))
        return [[pages.fate(kind, table, page) for page in each] for kind, pages in pairs]

    def _hit(self, table: PageTable) -> int:
        """The longest prefix, in tokens, that all classes hold: a length L at which every class has every page that the
        query after L tokens may see, and a class of states has the state."""
        count = max(len(table.ids) - 1, 0) // PAGE
        pairs = list(zip(self.classes, self.stored, strict=True))
        for kind, pages in pairs:
            if kind.retention.reach is None and not kind.state:
                count = next((p for p in range(count) if table.key(p) not in pages.page), count)
        while count and not all(pages.hold(kind, table, count) for kind, pages in pairs):
            count -= 1
        return count * PAGE

    def fork(self, table: PageTable) -> PageTable:
        """Another text that begins as this one does; the pages are shared."""
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
        """The text has ended; the pages of its prefixes stay as long as there is room."""
        self._check(table)
        for pages, numbers in zip(self.stored, table.pages, strict=True):
            for page in reversed(numbers):  # they are taken again in their order
                if page is not None:
                    pages.drop(page, self._now)
        for key in reversed(table.keys):  # the ends of a chain are evicted before their beginnings
            self._now += 1
            for pages in self.stored:
                pages.touch(key, self._now)
        table.pages, table.closed = [[] for _ in self.classes], True
        self._bound()

    def most(self, length: int, step: int) -> int:
        """Bytes of the most pages that a text of up to `length` tokens holds, of which a step reads `step` at most."""
        return sum(kind.nbytes * kind.most(length, step) for kind in self.classes)

    def missing(self, table: PageTable, count: int) -> int:
        """Bytes of the pages that `count` more tokens of a text would take."""
        return sum(kind.nbytes * self._wanted(i, table, count) for i, kind in enumerate(self.classes))

    def _wanted(self, of: int, table: PageTable, count: int) -> int:
        numbers = table.pages[of]
        if self.classes[of].state:
            return int(not numbers or self._is_shared(of, numbers[0]))
        new = -(-(len(table) + count) // PAGE) - len(numbers)
        partial = len(table) % PAGE != 0 and count > 0
        return new + int(partial and self._is_shared(of, numbers[-1]))

    def _is_shared(self, of: int, page: int | None) -> bool:
        """Whether others may read a page, so that it must not be written to."""
        assert page is not None
        return self.stored[of].users[page] > 1 or page in self.stored[of].key

    @property
    def available(self) -> int | None:
        """Bytes that can be taken; None is no bound."""
        if self.budget is None:
            return None
        return self.budget - self.held + self.idle

    def extend(self, table: PageTable, ids: Iterable[int]) -> list[Copy]:
        """Makes room for the next tokens of a text and returns what must be copied before they are stored.

        Raises CacheError, and changes nothing, where the budget has no room for them."""
        self._check(table)
        new = list(ids)
        if not new or len(table.ids) + len(new) <= table.room:
            table.ids += new
            return []
        if (left := self.available) is not None and (need := self.missing(table, len(new))) > left:
            raise CacheError(
                f"PagePool: {len(new)} more tokens take {need} bytes of pages, and {left} of {self.budget} are left"
            )
        copies = []
        for i, kind in enumerate(self.classes):
            numbers, pages = table.pages[i], self.stored[i]
            if (kind.state and numbers) or (not kind.state and len(table) % PAGE):
                old = numbers[-1]
                assert old is not None
                if self._is_shared(i, old):
                    numbers[-1] = page = self._take(i)
                    table.version += 1
                    copies.append(Copy(i, old, page))
                    pages.drop(old, self._now)
            last = 1 if kind.state else -(-(len(table) + len(new)) // PAGE)
            while len(numbers) < last:
                numbers.append(self._take(i))
                table.version += 1
        table.ids += new
        table.room = -(-len(table) // PAGE) * PAGE
        if copies:  # else no page has lost its last user
            self._bound()
        return copies

    def _take(self, of: int) -> int:
        """A page of a class. Where the budget is full, idle ones are given up, the least recently used first."""
        if self.budget is not None:
            while self.held + self.classes[of].nbytes > self.budget and self.idle:
                self._evict()
        return self.stored[of].take()

    def _evict(self) -> None:
        """Gives up the page that nobody has used for the longest time."""
        min((pages for pages in self.stored if pages.idle), key=lambda p: next(iter(p.idle.values()))).evict()

    def _bound(self) -> None:
        """Gives up idle pages beyond the bytes to be kept."""
        while self.keep is not None and self.idle > self.keep:
            self._evict()

    @property
    def held(self) -> int:
        """Bytes of pages that are in use or kept."""
        return sum(kind.nbytes * pages.held for kind, pages in zip(self.classes, self.stored, strict=True))

    @property
    def idle(self) -> int:
        """Bytes of pages that are kept, and nobody uses."""
        return sum(kind.nbytes * len(p.idle) for kind, p in zip(self.classes, self.stored, strict=True))

    def check_trim(self, table: PageTable, count: int) -> None:
        """Raises CacheError where the last `count` tokens cannot be taken back: for a class of states, for more than
        are there, and where what the tokens before them need is no longer held (`slack`)."""
        self._check(table)
        length = len(table) - count
        if not 0 <= length <= len(table):
            raise CacheError(f"PagePool: a text of {len(table)} tokens cannot take back {count}")
        if not count:
            return
        last = -(-length // PAGE)
        for kind, numbers in zip(self.classes, table.pages, strict=True):
            if kind.state:
                raise CacheError(
                    "PagePool: a state of all tokens cannot take one back; fork the text before it"
                )
            if any(numbers[p] is None and sees(kind.retention, p, length) for p in range(last)):
                raise CacheError(
                    f"PagePool: a text of {len(table)} tokens cannot take back {count}: layers that keep the last "
                    f"{kind.retention.reach} have released what the tokens before them see; give slack={count}"
                )

    def trim(self, table: PageTable, count: int) -> None:
        """Takes back the last `count` tokens. Raises CacheError, and changes nothing, as `check_trim` does."""
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
        """The tokens of a text are stored: full pages can be found by others, and those that no later query of the
        text sees are released."""
        self._check(table)
        for p in range(len(table.keys), len(table) // PAGE):
            key = table.key(p)
            for kind, pages, numbers in zip(self.classes, self.stored, table.pages, strict=True):
                page = None if kind.state else numbers[p]
                if page is not None:
                    pages.publish(page, key)
        for of, kind in self._forgetful:
            pages, numbers = self.stored[of], table.pages[of]
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
        """Keeps the states of a text whose length is a multiple of 64 for prefixes to come, where there is room, and
        returns what is to be copied."""
        self._check(table)
        copies: list[Copy] = []
        if self.keep == 0 or len(table.ids) % PAGE:
            return copies
        for i, (kind, pages, numbers) in enumerate(zip(self.classes, self.stored, table.pages, strict=True)):
            if not (kind.state and table.ids):
                continue
            key, left = table.key(len(table) // PAGE - 1), self.available
            if key in pages.page or (left is not None and kind.nbytes > left):
                continue
            state, page = numbers[0], self._take(i)
            assert state is not None
            copies.append(Copy(i, state, page))
            pages.publish(page, key)
            pages.drop(page, self._now)
        self._bound()
        return copies

    def compact(self) -> list[list[int]]:
        """Numbers the kept pages anew, from 0 on, and returns their old numbers, of each class. Raises CacheError while
        a page is in use."""
        if self.held > self.idle:
            raise CacheError("PagePool: pages that are in use keep their numbers; close the texts")
        return [pages.compact() for pages in self.stored]

    def _check(self, table: PageTable) -> None:
        if table.closed:
            raise CacheError("PagePool: the text is closed; open it again")

    def taken(self, of: int) -> int:
        """Pages of a class that were ever taken: all of their numbers are below it."""
        return len(self.stored[of].users)
