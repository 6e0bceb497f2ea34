"""What tests ask of a plan."""

from headway.attention import Entry, Plan


def entries(plan: Plan) -> list[list[Entry]]:
    """The entries of every query tile."""
    return [plan.row(tile) for tile in range(len(plan.first) - 1)]


def area(plan: Plan) -> int:
    """Slot pairs that are computed (queries of a short last tile counted as a full tile)."""
    return plan.tile * (sum(plan.end) - sum(plan.begin))
