"""Properties of a plan that tests compare."""

from headway.attention import Entry, Plan


def entries(plan: Plan) -> list[list[Entry]]:
    """Returns the entries of every query tile."""
    return [plan.row(tile) for tile in range(len(plan.first) - 1)]


def area(plan: Plan) -> int:
    """Returns the number of slot pairs that are computed (a short last query tile counts as a full tile)."""
    return plan.tile * (sum(plan.end) - sum(plan.begin))
