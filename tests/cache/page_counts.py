"""Counts of a pool's pages: free, used and kept."""

from headway.cache import PagePool


def page_counts(pool: PagePool) -> list[dict[str, int]]:
    """Returns for each class the pages that are free, in use, and kept for prefixes; their sum is all that were ever
    taken."""
    return [
        {
            "free": len(pages.free),
            "used": sum(map(bool, pages.users)),
            "kept": len(pages.idle),
            "all": len(pages.users),
        }
        for pages in pool.stored
    ]
