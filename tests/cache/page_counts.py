"""How many pages of a pool are free, used and kept."""

from headway.cache import PagePool


def page_counts(pool: PagePool) -> list[dict[str, int]]:
    """Of each class: pages that are free, in use, and kept for prefixes; together all that were ever taken."""
    return [
        {
            "free": len(pages.free),
            "used": sum(map(bool, pages.users)),
            "kept": len(pages.idle),
            "all": len(pages.users),
        }
        for pages in pool.stored
    ]
